"""Every error of this package, each named for the boundary that it crossed.

SandboxError
 |- SandboxConfigError            settings that contradict this host or each other
 |- ProviderUnavailableError      the provider cannot run on this host at all
 |- ImageError                    an image is there but cannot be used, or could not be made
 |   |- ImageNotFoundError        no image has this name, path or reference
 |   `- ImageBuildError           building or pulling it failed
 |- SandboxStartError             a sandbox did not come up                          retryable
 |   `- NoProcessError            no room for a program; a LimitExceededError too, of the limit "processes"
 |- SandboxClosedError            it has been closed, or has ended by itself
 |- SessionDiedError              a bash or Python session ended under a command     retryable
 |- LimitExceededError            memory, processes, disk, lifetime, output or time: `limit` says which
 `- SandboxFileError              a file operation inside of the sandbox
     |- FileMissingError          no such file or folder
     |- FileTooLargeError         larger than the caller allows
     |- FileStalledError          no byte of it moved for as long as one may take
     |- DiskFullError             no room for it; a LimitExceededError too, of the limit "disk"
     `- EditMatchError            the text to replace is not there exactly once

The message says what happened, `hint` what to do next, `retryable` whether the same call may work later.
A command that fails is not an error but a result with an exit code.
"""

from typing import ClassVar


class SandboxError(Exception):
    """The base of the family."""

    code: ClassVar[str] = "sandbox_error"
    """A stable name for logs, metrics and the API."""

    retryable: ClassVar[bool] = False
    """Whether the same call, made again in a fresh sandbox, may work."""

    default_hint: ClassVar[str] = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = self.default_hint if hint is None else hint


class SandboxConfigError(SandboxError):
    """The settings of a provider or the specification of a sandbox cannot be met."""

    code = "sandbox_config"


class ProviderUnavailableError(SandboxError):
    """The provider cannot run on this host, for example because Apptainer is not installed."""

    code = "provider_unavailable"
    default_hint = "run ./scripts/install-apptainer"


class ImageError(SandboxError):
    """An image cannot be built, read or used."""

    code = "image_error"


class ImageNotFoundError(ImageError):
    """No image has this name, path or reference."""

    code = "image_not_found"
    default_hint = "list the images with `rollout-service image list`"


class ImageBuildError(ImageError):
    """An image could not be built or pulled; the message ends with what the builder said last."""

    code = "image_build"

    def __init__(self, message: str, *, hint: str | None = None, output: str = "") -> None:
        super().__init__(f"{message}\n{output}".rstrip(), hint=hint)
        self.summary = message
        """The message without the builder's output."""


class SandboxStartError(SandboxError):
    """A sandbox did not come up; the message ends with what its launcher said."""

    code = "sandbox_start"
    retryable = True
    default_hint = "`rollout-service doctor` says what this host lacks"


class SandboxClosedError(SandboxError):
    """The sandbox has been closed, or all of it has ended by itself; nothing can be run in it any more."""

    code = "sandbox_closed"
    default_hint = "start a new sandbox"


class SessionDiedError(SandboxError):
    """A session ended under a command; its variables are lost, files stay. The next call starts anew."""

    code = "session_died"
    retryable = True
    default_hint = "the next call starts a new session in the same sandbox; files are kept, variables are not"

    def __init__(
        self, message: str, *, output: str = "", timed_out: bool = False, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.output = output
        """What the command had printed until then, cut to its limit."""
        self.timed_out = timed_out
        """Whether the session was ended because nothing less stopped the command at its time-out."""


class LimitExceededError(SandboxError):
    """A limit was reached; `limit` names it: memory, processes, disk, lifetime, and of a call output and time."""

    code = "limit_exceeded"

    def __init__(self, message: str, *, limit: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.limit = limit
        self.output = ""
        """What a command had printed before its session was ended, cut to its limit."""


class SandboxFileError(SandboxError):
    """A file inside of the sandbox could not be read, written, listed or copied."""

    code = "file_error"


class FileMissingError(SandboxFileError):
    """There is no such file or folder in the sandbox."""

    code = "file_not_found"


class FileTooLargeError(SandboxFileError):
    """The file, or the tree, is larger than the caller allows."""

    code = "file_too_large"


class FileStalledError(SandboxFileError):
    """A program of the sandbox, or its disk, moved no byte of a file for as long as it may."""

    code = "file_stalled"
    default_hint = "a program inside, such as tar or bash, may have been replaced by one that never ends"


class DiskFullError(LimitExceededError, SandboxFileError):
    """There is no room left in the sandbox for what was to be written."""

    default_hint = "remove files in the sandbox, or give it more with `disk_bytes`"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, limit="disk", hint=hint)


class NoProcessError(LimitExceededError, SandboxStartError):
    """No program could be started in a sandbox that is up: its processes, or the host's, are used up."""

    default_hint = "end processes in the sandbox, or give it more with `max_processes`"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, limit="processes", hint=hint)


class EditMatchError(SandboxFileError):
    """The text to replace is not in the file, or more than once; `count` says how often."""

    code = "edit_not_unique"
    default_hint = "give enough of the surrounding lines to make the text unique"

    def __init__(self, message: str, *, count: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.count = count
