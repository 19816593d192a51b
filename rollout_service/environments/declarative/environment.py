"""An environment without Python: a folder with an `environment.toml` and the commands that it names.

Guarantees:
- While the agent works, its sandbox holds nothing of the grader, and of the instance only what the prompt and the init
  command put there.
- The grader and its files come after every process of the agent has ended, outside the agent's folders. Its result has
  an unguessable path, and the host reads it after the grader's processes have ended too.
- A result that is missing or is not a finite number is an error, never a zero.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from secrets import token_hex

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from api_schemas.rollouts import StopReason
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError
from rollout_service.base.masking import mask_texts
from rollout_service.base.templates import require_plain
from rollout_service.environments import lint
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.dataset_files import ShippedTasks
from rollout_service.environments.declarative.declaration import (
    FILE_NAME,
    INSIDE,
    Declaration,
    dataset_files,
    read_declaration,
    read_text,
)
from rollout_service.environments.declarative.files import PackedFile, archive, exported_file, read_folder
from rollout_service.environments.declarative.from_image import empty_folder
from rollout_service.environments.submission import encode_runs, read_inputs, run_submission
from rollout_service.episodes import Episode, Score
from sandboxes import ExecResult, Sandbox, SessionName
from sandboxes.errors import FileMissingError, FileStalledError, SandboxFileError
from sandboxes.image_names import find_own_file
from sandboxes.sessions.serial_session import return_to_workdir

RUNS = "runs.json"
SECRETS = "secrets.sh"
_WITH_SECRETS = '. "$0" && rm -f -- "$0" && exec "$@"'
"""The file with the secrets is gone when the command begins."""
DOCKERFILE, DEFINITION = "Dockerfile", ".def"
"""Files that images are built from: Docker's name, and Apptainer's suffix."""
CHMOD_SECONDS = 10.0
"""`chmod` takes milliseconds unless the agent has replaced it."""
MAX_RESULT_BYTES = 64 * 1024
SHOWN_RESULT_BYTES = 200
"""How much of an unusable result an error has."""
EXIT_TEXT_CHARS = 2_000
RESULT_HINT = 'Write {"reward": NUMBER, "parts": {"name": NUMBER}} to the file that $ROLLOUT_RESULT names.'
NAMED = re.compile(rf"(?<![\w./-]){INSIDE}/([^\s;|&<>'\"]+)")
"""A file of the environment in a command."""
HOW_TO_SEE_IT_FAIL = {
    "init": "Begin the command with `set -x; ` to see here which step fails.",
    "evaluate": "Its result counts only if it exits with 0. `rollout-service env shell DIR --stage evaluate` opens a "
    "shell where it runs.",
    "solution": "`rollout-service env shell DIR` opens a shell where it runs.",
}
_FOLDER = re.compile(rf"(?<![\w./-]){INSIDE}(?![\w.-])")


class _Result(BaseModel):
    """Booleans, strings and non-finite numbers are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    reward: float
    parts: dict[str, float] = {}


class DeclarativeEnvironment(AgentEnvironment):
    def __init__(
        self, declaration: Declaration, folder: Path, *, in_image: bool = False, warnings: Sequence[str] = ()
    ) -> None:
        """If the declaration's folder is `in_image` too, sandboxes show an empty one in its place."""
        if (run := declaration.evaluate.run) and _FOLDER.search(run.command):
            raise ConfigurationError(
                f"environment {declaration.name!r}: [evaluate.run] names {INSIDE}, which is not there when it runs",
                hint="It runs the agent's program. Move the grader's work to [evaluate] command.",
            )
        spec = declaration.spec(folder)
        if in_image:
            spec = spec.model_copy(update={"binds": {INSIDE: str(empty_folder())}})
        self.replayable = declaration.replayable
        self.shares_setup = declaration.init is not None and declaration.init.shared
        self.init_leaves_files = declaration.harness is None
        super().__init__(spec)
        self._declaration = declaration
        files = dataset_files(declaration.dataset, folder)
        self.shipped = ShippedTasks.read(files)
        self._files = read_folder(folder, without=[path for path, _ in files])
        self.has_solution = declaration.solution is not None
        self._init_files = _init_files(declaration, self._files)
        self._warnings = list(warnings)

    async def prepare(self, episode: Episode) -> None:
        if self.shares_setup and (init := self._declaration.init):
            await self._run_init(episode, init.command, frozenset())

    async def init(self, episode: Episode) -> None:
        await super().init(episode)
        if init := self._declaration.init:
            if not self.shares_setup:
                await self._run_init(episode, init.command, self.spec.sessions)
            elif init.each:
                await self._run_init(episode, init.each, self.spec.sessions)

    async def _run_init(self, episode: Episode, command: str, sessions: frozenset[SessionName]) -> None:
        sandbox = episode.require_sandbox()
        files = [instance_file(episode.instance), *self._init_files]
        place = await SecretFolder.make(sandbox, files, episode)
        result = await place.run(command, cwd=sandbox.workdir, seconds=episode.limits.init_seconds)
        require_success("init", command, result)
        await _enter_again(sandbox, sessions, command)
        await place.remove()

    def check(self, instance: dict[str, JsonValue]) -> None:
        super().check(instance)
        if run := self._declaration.evaluate.run:
            read_inputs(run, instance)

    async def execute(self, episode: Episode) -> None:
        if run := self._declaration.evaluate.run:
            inputs, seconds = read_inputs(run, episode.instance), episode.limits.evaluate_seconds / 2
            episode.state[RUNS] = await run_submission(episode.require_sandbox(), run, inputs, seconds)

    async def evaluate(self, episode: Episode) -> Score:
        sandbox = episode.require_sandbox()
        inputs = [
            instance_file(episode.instance),
            PackedFile("answer.txt", (episode.answer or "").encode(errors="replace")),
            PackedFile(RUNS, encode_runs(episode.state.get(RUNS, []))),
        ]
        place = await SecretFolder.make(sandbox, [*inputs, *below(self._files)], episode)
        command, seconds = self._declaration.evaluate.command, episode.limits.evaluate_seconds
        # Not the working folder: a module there could shadow one that the grader imports.
        result = await place.run(command, cwd=place.path, seconds=seconds)
        require_success("evaluate", command, result)
        episode.grader_output = _printed(result)
        return parse_score(await place.result(result), result)

    async def solve(self, episode: Episode) -> StopReason:
        if (solution := self._declaration.solution) is None:
            return await super().solve(episode)
        sandbox = episode.require_sandbox()
        place = await SecretFolder.make(sandbox, [instance_file(episode.instance), *below(self._files)])
        seconds = episode.limits.agent_seconds
        result = await place.run(solution.command, cwd=sandbox.workdir, seconds=seconds)
        require_success("solution", solution.command, result)
        await place.remove()
        episode.answer = result.stdout.decode(errors="replace").strip()
        return StopReason.FINISHED

    def private_texts(self) -> dict[str, str]:
        shown = {file.path.removeprefix("environment/") for file in self._init_files} | {FILE_NAME}
        known = {line.strip() for file in self._init_files for line in file.data.splitlines()}
        contexts = _build_contexts(self._files)
        return {
            file.path: b"\n".join(line for line in file.data.splitlines() if line.strip() not in known).decode(
                errors="replace"
            )
            for file in self._files
            if file.path not in shown and not contexts.intersection(PurePosixPath(file.path).parents)
        }

    def findings(self) -> list[str]:
        return [*lint.findings(self._declaration, self._files), *super().findings()]

    def warnings(self) -> list[str]:
        return self._warnings


@dataclass(frozen=True, slots=True)
class SecretFolder:
    """A folder at an unguessable path, with the files that one command needs."""

    sandbox: Sandbox
    path: str
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables of the one command that `run` runs."""
    hidden: Collection[str] = field(default=(), repr=False)
    """Texts that are masked in its output."""

    @classmethod
    async def make(cls, sandbox: Sandbox, files: list[PackedFile], episode: Episode | None = None) -> SecretFolder:
        """Copy files to a new folder; the command that runs there gets the episode's secrets.

        Raises:
            FileStalledError: A program in the sandbox hangs.
            SandboxFileError: Copying failed.
        """
        # Without isolation, only the sandbox's own folder may be written to.
        secrets, hidden = (episode.secrets, episode.hidden) if episode is not None else ({}, ())
        files = [*files, _secrets_file(secrets)] if secrets else files
        isolated = sandbox.workdir == sandbox.spec.workdir
        path = f"{'/tmp' if isolated else sandbox.workdir}/.rollout-{token_hex(16)}"  # noqa: S108
        try:
            await sandbox.import_path(path, archive(files))
        except FileStalledError:
            raise  # another try would hang too
        except SandboxFileError:  # the agent owns the folders above, and may have made them unwritable
            command = ["chmod", "u+rwx", "/", str(PurePosixPath(path).parent)]
            await sandbox.exec(command, cwd="/", timeout=CHMOD_SECONDS)
            await sandbox.import_path(path, archive(files))
        return cls(sandbox, path, secrets, hidden)

    async def run(self, command: str, *, cwd: str, seconds: float) -> ExecResult:
        """Run a command whose variables say where everything is; secrets in its output are masked."""
        argv = self.command(command)
        if self.secrets:
            argv = ["bash", "-c", _WITH_SECRETS, f"{self.path}/{SECRETS}", *argv]
        result = await self.sandbox.exec(argv, cwd=cwd, env=self.env(), timeout=seconds)
        stdout, stderr = (mask_texts(output, self.hidden) for output in (result.stdout, result.stderr))
        return replace(result, stdout=stdout, stderr=stderr)

    def command(self, command: str) -> list[str]:
        return ["bash", "-c", _FOLDER.sub(self._environment, command)]

    def env(self) -> dict[str, str]:
        return {
            # Programs must not read the agent's settings, such as ~/.gitconfig or ~/.local.
            "HOME": self.path,
            "ROLLOUT_ENVIRONMENT": self._environment,
            "ROLLOUT_INSTANCE": f"{self.path}/instance.json",
            "ROLLOUT_ANSWER": f"{self.path}/answer.txt",
            "ROLLOUT_RUNS": f"{self.path}/{RUNS}",
            "ROLLOUT_RESULT": f"{self.path}/result.json",
            "ROLLOUT_WORKDIR": self.sandbox.workdir,
        }

    @property
    def _environment(self) -> str:
        return f"{self.path}/environment"

    async def result(self, run: ExecResult) -> bytes:
        """
        Raises:
            EnvironmentFailedError: The command wrote no result; the message has its output.
        """
        await self.sandbox.end_processes()
        try:
            return await exported_file(self.sandbox, f"{self.path}/result.json", MAX_RESULT_BYTES)
        except SandboxFileError as error:
            raise EnvironmentFailedError(
                f"the evaluate command left no result: {error}; {_it_printed(run)}",
                hint=RESULT_HINT,
            ) from error

    async def remove(self) -> None:
        result = await self.sandbox.exec(["rm", "-rf", "--", self.path])
        if result.exit_code != 0:
            raise EnvironmentFailedError(
                f"{self.path} cannot be removed, so the agent could read the task's data: {_printed(result)}"
            )


def load_folder(folder: Path, *, image: Path | None = None) -> DeclarativeEnvironment:
    """`image` is the image that the folder was extracted from, if any."""
    path = folder / FILE_NAME
    text = read_text(path)
    if image is None:
        return _make(read_declaration(text, where=str(path)), folder, str(path))
    where = f"{image}:{INSIDE}/{FILE_NAME}"
    declaration = read_declaration(text, where=where, image=str(image))
    _require_nothing_of_the_host(declaration, folder, where)
    for name, source in {"prompt": declaration.prompt, "system": declaration.system or ""}.items():
        require_plain(source, where=f"{where}: `{name}`")
    named = tomllib.loads(text).get("image")
    ignored = f"image: the key ({named!r}) has no effect: the environment is inside the image {image}"
    return _make(declaration, folder, where, in_image=True, warnings=[] if named is None else [ignored])


def _make(
    declaration: Declaration,
    folder: Path,
    where: str,
    *,
    in_image: bool = False,
    warnings: Sequence[str] = (),
) -> DeclarativeEnvironment:
    """Let errors name the file, `where`, unless they name one themselves."""
    try:
        return DeclarativeEnvironment(declaration, folder, in_image=in_image, warnings=warnings)
    except ConfigurationError as error:
        message = str(error) if str(folder) in str(error) else f"{where}: {error}"
        raise ConfigurationError(message, hint=error.hint) from error


def _require_nothing_of_the_host(declaration: Declaration, folder: Path, where: str) -> None:
    """Refuse paths that lead out of the folder, and services that the host itself asks: an image is downloaded data."""
    outside = [
        f"{where}: dataset: {path} is not a file in {INSIDE}"
        for path, _ in dataset_files(declaration.dataset, folder)
        if find_own_file(folder, str(path)) is None
    ]
    if declaration.search is not None:
        outside.append(f"{where}: search: an image cannot name addresses that this machine asks, such as its own")
    if outside:
        hint = f"Put an {FILE_NAME} of yours into a folder next to the image, and name what it needs there."
        raise ConfigurationError("\n".join(outside), hint=hint)


def parse_score(data: bytes, run: ExecResult | None = None) -> Score:
    """Parse `{"reward": NUMBER, "parts": {NAME: NUMBER, ...}}`.

    Raises:
        EnvironmentFailedError: The data has another form; the message has the output of `run`, if given.
    """
    try:
        result = _Result.model_validate_json(data)
    except ValidationError as error:
        reasons = "; ".join(
            f"{'.'.join(map(str, item['loc'])) or 'the file'}: {item['msg']}"
            for item in error.errors(include_url=False, include_input=False)
        )
        printed = f"; {_it_printed(run)}" if run else ""
        wrote = data[:SHOWN_RESULT_BYTES].decode(errors="replace")
        raise EnvironmentFailedError(
            f"the evaluate command wrote no usable result: {reasons}; it wrote {wrote!r}{printed}",
            hint=RESULT_HINT,
        ) from error
    return Score(result.reward, result.parts)


async def _enter_again(sandbox: Sandbox, sessions: frozenset[SessionName], command: str) -> None:
    """Return to the working folder, which the init command may have replaced since sessions were opened."""
    try:
        await return_to_workdir(sandbox, sessions)
    except FileMissingError as error:
        raise EnvironmentFailedError(
            f"the init command {command!r} left no working folder: {error}",
            hint="The command must leave a folder at $ROLLOUT_WORKDIR.",
        ) from error


def require_success(stage: str, command: str, result: ExecResult) -> None:
    """Raise EnvironmentFailedError, with the output, unless the command succeeded."""
    if result.exit_code == 0:
        return
    how = "did not end in time" if result.timed_out else f"ended with exit code {result.exit_code}"
    reached = [one for one in result.limit_violations if not one.is_of_call]
    raise EnvironmentFailedError(
        f"the {stage} command {'; '.join([f'{command!r} {how}', *map(str, reached)])}: "
        f"{_printed(result) or 'it printed nothing'}",
        hint="Let the command need less, or raise the limit in [sandbox] of the environment."
        if reached
        else HOW_TO_SEE_IT_FAIL[stage],
    )


def _it_printed(result: ExecResult) -> str:
    return f"it printed: {_printed(result)}" if _printed(result) else "it printed nothing"


def _printed(result: ExecResult) -> str:
    text = (result.stderr + result.stdout).decode(errors="replace").strip()
    return text[-EXIT_TEXT_CHARS:]


def _secrets_file(secrets: Mapping[str, str]) -> PackedFile:
    """Set the secrets by a file: the control shell, which the agent meets, never has them."""
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items()]
    return PackedFile(SECRETS, "".join(lines).encode())


def instance_file(instance: dict[str, JsonValue]) -> PackedFile:
    return PackedFile("instance.json", json.dumps(instance).encode())


def below(files: tuple[PackedFile, ...]) -> list[PackedFile]:
    return [PackedFile(f"environment/{file.path}", file.data, file.executable) for file in files]


def _build_contexts(files: tuple[PackedFile, ...]) -> set[PurePosixPath]:
    """Return the folders below the environment's that an image is built from: the agent is meant to see their files."""
    paths = [PurePosixPath(file.path) for file in files]
    built = {path.parent for path in paths if path.name == DOCKERFILE or path.suffix == DEFINITION}
    return built - {PurePosixPath()}


def _init_files(declaration: Declaration, files: tuple[PackedFile, ...]) -> list[PackedFile]:
    if declaration.init is None:
        return []
    commands = f"{declaration.init.command}\n{declaration.init.each or ''}"
    wanted = [*NAMED.findall(commands), *declaration.init.files]
    chosen = {
        file.path: file
        for name in wanted
        for file in files
        if file.path == name.strip("/") or file.path.startswith(f"{name.strip('/')}/")
    }
    missing = [name for name in wanted if not any((path + "/").startswith(f"{name.strip('/')}/") for path in chosen)]
    if missing:
        raise ConfigurationError(
            f"environment {declaration.name!r}: the init command needs {', '.join(missing)}, which the folder lacks",
            hint="Put it there, or correct `command` or `files` in [init].",
        )
    return below(tuple(chosen.values()))
