"""Errors of this package, each named for the boundary it crossed.

The message says what happened, `hint` what to do next, and `retryable` whether the same call may work later. A command
that fails is not an error but a result with an exit code.
"""

from typing import ClassVar

__all__ = [
    "DiskFullError",
    "DockerfileError",
    "EditMatchError",
    "FileMissingError",
    "FileStalledError",
    "FileTooLargeError",
    "ImageBuildError",
    "ImageError",
    "ImageNotFoundError",
    "ImagePathError",
    "LimitExceededError",
    "NoProcessError",
    "ProviderUnavailableError",
    "SandboxClosedError",
    "SandboxConfigError",
    "SandboxError",
    "SandboxFileError",
    "SandboxLostError",
    "SandboxPauseError",
    "SandboxQuotaError",
    "SandboxResumeError",
    "SandboxStartError",
    "SandboxUnsavedError",
    "SessionDiedError",
]


class SandboxError(Exception):
    code: ClassVar[str] = "sandbox_error"
    """A stable name for logs, metrics and the API."""

    retryable: ClassVar[bool] = False
    """Whether the same call may work when repeated in a fresh sandbox."""

    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = self.default_hint if hint is None else hint


class SandboxConfigError(SandboxError):
    """Settings or a sandbox's specification cannot be met."""

    code = "sandbox_config"


class ProviderUnavailableError(SandboxError):
    """The provider cannot run on this host, for example because Apptainer is not installed."""

    code = "provider_unavailable"
    default_hint = "run ./scripts/install-apptainer"


class ImageError(SandboxError):
    code = "image_error"


class ImageNotFoundError(ImageError):
    code = "image_not_found"
    default_hint = "list the images with `rollout-service image list`"


class ImagePathError(ImageError):
    """A downloaded task, an instance or a Dockerfile names an image by a path of this machine, or by no name at all."""

    code = "image_path"
    default_hint = (
        "name an image of `rollout-service image list`, or one of a registry as docker://NAME:TAG; "
        "only what an administrator writes may name paths"
    )


class DockerfileError(ImageError):
    """A Dockerfile cannot be understood, or asks for something unsupported; the message begins with file and line."""

    code = "dockerfile"

    def __init__(self, message: str, *, file: str, line: int, hint: str | None = None) -> None:
        super().__init__(f"{file}:{line}: {message}", hint=hint)
        self.line = line
        """The line where the instruction begins, counted from 1."""


class ImageBuildError(ImageError):
    """An image could not be built or pulled; the message ends with the builder's last lines."""

    code = "image_build"

    def __init__(self, message: str, *, hint: str | None = None, output: str = "") -> None:
        super().__init__(f"{message}\n{output}".rstrip(), hint=hint)
        self.summary = message


class SandboxStartError(SandboxError):
    """A sandbox did not start; the message ends with the launcher's output."""

    code = "sandbox_start"
    retryable = True
    default_hint = "run `rollout-service doctor` to see what this host lacks"


class SandboxQuotaError(SandboxStartError):
    """A server that starts sandboxes for others refused one more for now."""

    code = "sandbox_quota"
    default_hint = "lower sandboxes.ceiling to what the account allows, or raise the account's limit"


class SandboxLostError(SandboxError):
    """A server, or what the sandbox needs on this host, ended or is out of reach; the code inside is not the cause."""

    code = "sandbox_lost"
    retryable = True
    default_hint = "start a new sandbox; check the server's status and its longest lifetime of sandboxes"


class SandboxClosedError(SandboxError):
    """The sandbox was closed or ended by itself; nothing can run in it any more."""

    code = "sandbox_closed"
    default_hint = "start a new sandbox"


class SandboxPauseError(SandboxError):
    """A sandbox was not paused as it should have been. It runs, and can be used."""

    code = "sandbox_pause"


class SandboxUnsavedError(SandboxError):
    """A sandbox holds something that cannot be saved; the message names it. It runs, and can be used."""

    code = "sandbox_unsaved"


class SandboxResumeError(SandboxError):
    """A paused sandbox cannot be resumed, so that nothing can run in it; `close` ends it."""

    code = "sandbox_resume"
    retryable = True
    default_hint = "look at the control groups of this host; `sandboxes.pause_seconds = 0` pauses no more sandboxes"


class SessionDiedError(SandboxError):
    """A session ended during a command. Its variables are lost, files stay, and the next call starts a new session."""

    code = "session_died"
    retryable = True
    default_hint = "the next call starts a new session in the same sandbox; files are kept, variables are not"

    def __init__(self, message: str, *, output: str = "", timed_out: bool = False, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.output = output
        """The command's output so far, cut to its limit."""
        self.timed_out = timed_out
        """Whether the session was ended because nothing else stopped the command at its timeout."""


class LimitExceededError(SandboxError):
    """A limit was reached. `limit` names it: memory, processes, disk or lifetime, or output or time for a call."""

    code = "limit_exceeded"

    def __init__(self, message: str, *, limit: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.limit = limit
        self.output = ""
        """The command's output before its session was ended, cut to its limit."""

    @property
    def is_of_call(self) -> bool:
        return self.limit in ("output", "time")


class SandboxFileError(SandboxError):
    code = "file_error"


class FileMissingError(SandboxFileError):
    code = "file_not_found"


class FileTooLargeError(SandboxFileError):
    """The file, or the tree, is larger than the caller allows."""

    code = "file_too_large"


class FileStalledError(SandboxFileError):
    """A program of the sandbox, or its disk, moved no byte of a file within the time allowed."""

    code = "file_stalled"
    default_hint = "check whether a program inside, such as tar or bash, was replaced by one that never ends"


class DiskFullError(LimitExceededError, SandboxFileError):
    default_hint = "remove files in the sandbox, or give it more with `disk_bytes`"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, limit="disk", hint=hint)


class NoProcessError(LimitExceededError, SandboxStartError):
    """No program could be started in a running sandbox: its processes, or the host's, are used up."""

    default_hint = "end processes in the sandbox, or give it more with `max_processes`"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, limit="processes", hint=hint)


class EditMatchError(SandboxFileError):
    """The text to replace does not occur in the file, or occurs more than once; `count` says how often."""

    code = "edit_not_unique"
    default_hint = "give enough of the surrounding lines to make the text unique"

    def __init__(self, message: str, *, count: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.count = count
