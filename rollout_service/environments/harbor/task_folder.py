"""One task on disk: `task.toml`, the instructions, the tests, the solution, and the image's Dockerfile.

Guarantees: everything but the tests and the solution is read when the task is loaded; nothing outside its folder is
read, whatever links there are. A task that is not valid, or has an unsupported key, raises ConfigurationError with its
path.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.declarative.declaration import read_text
from rollout_service.environments.declarative.files import PackedFile, read_folder
from rollout_service.environments.harbor import FILE_NAME
from rollout_service.environments.harbor.compose import FILES, MAIN, Compose, read_compose
from rollout_service.environments.harbor.task_toml import (
    AgentTable,
    ArtifactTable,
    EnvironmentTable,
    HealthcheckTable,
    StepTable,
    TaskToml,
    VerifierTable,
    read_task_toml,
)
from sandboxes.errors import ImageError, ImagePathError
from sandboxes.image_names import find_own_file, read_image_name
from sandboxes.images.dockerfiles import dockerfile_at
from sandboxes.images.sources import name_of_reference

TEST = "test.sh"
SOLUTION = "solve.sh"
SETUP = "setup.sh"
VERIFIER = "verifier.environment"
NAME_CHARS = 40
"""The part of an image's name that is the task's; a digest follows."""


@dataclass(frozen=True, slots=True)
class TaskStep:
    """A prompt of a task, and how its outcome is graded."""

    name: str
    """Empty for the step of a task without steps."""
    instruction: str
    agent: AgentTable
    verifier: VerifierTable
    min_reward: float | dict[str, float] | None
    healthcheck: HealthcheckTable | None
    folders: tuple[Path, ...]
    """The task's, and the step's, whose files win."""

    def tests(self) -> tuple[PackedFile, ...]:
        """Read the tests. As for all files of a step, this blocks."""
        return self._read("tests")

    def solution(self) -> tuple[PackedFile, ...]:
        return self._read("solution")

    def workdir(self) -> tuple[PackedFile, ...]:
        return self._read("workdir") if self.name else ()

    def _read(self, name: str) -> tuple[PackedFile, ...]:
        found = {
            file.path: file
            for folder in self.folders
            if (folder / name).is_dir()
            for file in read_folder(folder / name)
        }
        return tuple(found.values())


@dataclass(frozen=True, slots=True)
class HarborTask:
    name: str
    folder: Path
    toml: TaskToml
    steps: tuple[TaskStep, ...]
    image: str
    """A name with a digest of `environment`, or the value of `docker_image`."""
    verifier_image: str | None
    """The image of a separate verifier that has one of its own."""
    compose: Compose | None
    warnings: tuple[str, ...]
    """Keys without effect here."""

    @property
    def has_solution(self) -> bool:
        return all(any((folder / "solution" / SOLUTION).is_file() for folder in step.folders) for step in self.steps)

    def empty_instructions(self) -> Iterator[str]:
        """Report instructions without a word."""
        for step in self.steps:
            if not step.instruction.strip():
                name = f"steps/{step.name}/instruction.md" if step.name else "instruction.md"
                yield f"{name}: it is empty; write what the agent has to do"

    def unusable_scripts(self) -> Iterator[str]:
        """Report Windows line endings, which no shell can read; this blocks."""
        for path, file in self._scripts():
            if file.data.partition(b"\n")[0].endswith(b"\r"):
                yield f"{path}: it has Windows line endings, which shells cannot read; convert it with `dos2unix`"

    def _scripts(self) -> Iterator[tuple[str, PackedFile]]:
        """Yield each file that a task runs once, with its path in the task's folder."""
        folders = dict.fromkeys(folder for step in self.steps for folder in step.folders)
        for folder in folders:
            for place in ("tests", "solution", "workdir"):
                if (folder / place).is_dir():
                    below = (folder / place).relative_to(self.folder)
                    for file in read_folder(folder / place):
                        if file.path.endswith(".sh") or file.data.startswith(b"#!"):
                            yield f"{below}/{file.path}", file

    def dockerfiles(self) -> dict[str, Path]:
        found = {self.image: _dockerfile(self.folder / "environment")}
        if self.verifier_image is not None:
            found[self.verifier_image] = _dockerfile(self.folder / "tests")
        return {name: path for name, path in found.items() if path is not None}


def load_task(folder: Path, name: str, allowed: Container[str] = ()) -> HarborTask:
    """Load a task, whose Compose file may read the `allowed` variables of this machine."""
    where = folder / FILE_NAME
    _require_inside(folder)
    toml = read_task_toml(read_text(where), where=str(where))
    compose = _compose(folder, toml, allowed)
    refusals = [f"{where}: {refusal}" for refusal in _refusals(folder, toml, compose)]
    if refusals:
        raise ConfigurationError("\n".join(refusals), hint="Leave the task out, or change it.")
    verifier = toml.verifier.environment if toml.verifier.is_separate else None
    return HarborTask(
        name=name,
        folder=folder,
        toml=toml,
        steps=tuple(_steps(folder, toml)),
        image=_image(folder, "environment", toml.environment, folder / "environment", name),
        verifier_image=_verifier_image(folder, verifier, name),
        compose=compose,
        warnings=tuple(_warnings(toml)),
    )


def _steps(folder: Path, toml: TaskToml) -> Iterator[TaskStep]:
    if not toml.steps:
        yield TaskStep(
            name="",
            instruction=read_text(folder / "instruction.md"),
            agent=toml.agent,
            verifier=toml.verifier,
            min_reward=None,
            healthcheck=None,
            folders=(folder,),
        )
    for step in toml.steps:
        own = folder / "steps" / step.name
        yield TaskStep(
            name=step.name,
            instruction=read_text(own / "instruction.md"),
            agent=_agent_of(step, toml),
            verifier=_verifier_of(step, toml),
            min_reward=step.min_reward,
            healthcheck=step.healthcheck,
            folders=(folder, own),
        )


def _agent_of(step: StepTable, toml: TaskToml) -> AgentTable:
    return step.agent if step.agent.timeout_sec is not None else toml.agent


def _verifier_of(step: StepTable, toml: TaskToml) -> VerifierTable:
    """Add the task's variables, as Harbor does. A step without a time has the default, or the task's if longer."""
    own = step.verifier or VerifierTable()
    seconds = own.timeout_sec
    if "timeout_sec" not in own.model_fields_set:
        seconds = max(seconds, toml.verifier.timeout_sec)
    return own.model_copy(update={"env": toml.verifier.env | own.env, "timeout_sec": seconds})


def _compose(folder: Path, toml: TaskToml, allowed: Container[str]) -> Compose | None:
    context = folder / "environment"
    paths = [context / name for name in FILES if (context / name).exists()]
    if not paths:
        return None
    if len(paths) > 1:
        raise ConfigurationError(f"{context} has {len(paths)} Compose files", hint="Keep one of them.")

    def images() -> set[str]:
        found = {toml.environment.docker_image or ""}
        with suppress(ImageError):  # the build says what is wrong
            found |= {*dockerfile_at(context).plan().bases}
        return found

    return read_compose(paths[0], images=images, allowed=allowed)


def _refusals(folder: Path, toml: TaskToml, compose: Compose | None) -> Iterator[str]:
    services = {MAIN, *compose.services} if compose is not None else set[str]()
    if services and len(toml.steps) > 1:
        yield "steps: a task of several steps cannot have services, since processes end with each step"
    tests = [folder / "tests", *(folder / "steps" / step.name / "tests" for step in toml.steps)]
    if not any((path / TEST).is_file() for path in tests):
        yield f"tests/{TEST} is missing, and nothing else grades the task"
    yield from _key_refusals(toml, services)


def _key_refusals(toml: TaskToml, services: Set[str]) -> Iterator[str]:
    yield from _environment_refusals("environment", toml.environment)
    if toml.verifier.environment is not None:
        yield from _environment_refusals(VERIFIER, toml.verifier.environment)
    if toml.environment.mcp_servers and len(toml.steps) > 1:
        yield "environment.mcp_servers: a task of several steps cannot have servers"
    for path, entry in _artifacts(toml):
        if isinstance(entry, ArtifactTable) and entry.service not in (None, *services):
            yield f"{path}.service: there is no service {entry.service!r} in a Compose file of the task"
    for number, command in enumerate(toml.verifier.collect):
        if command.service not in (None, *services):
            yield f"verifier.collect.{number}.service: there is no service {command.service!r} in a Compose file"
    for number, step in enumerate(toml.steps):
        if step.agent.network_mode is not None:
            yield f"steps.{number}.agent.network_mode: the network of a sandbox cannot change"
        if step.verifier is not None and (step.verifier.is_separate or step.verifier.network_mode is not None):
            yield f"steps.{number}.verifier: all steps have the verifier's sandbox of the task"


def _environment_refusals(path: str, table: EnvironmentTable) -> Iterator[str]:
    for number, server in enumerate(table.mcp_servers):
        if path == VERIFIER or server.transport == "sse":
            what = "a verifier has no agent" if path == VERIFIER else "the transport sse is not supported"
            yield f"{path}.mcp_servers.{number}: {what}"
    if table.gpus:
        yield f"{path}.gpus: sandboxes have no GPU"
    if table.tpu is not None:
        yield f"{path}.tpu: sandboxes have no TPU"
    if table.os != "linux":
        yield f"{path}.os: sandboxes run Linux, not {table.os!r}"


def _artifacts(toml: TaskToml) -> Iterator[tuple[str, str | ArtifactTable]]:
    for number, entry in enumerate(toml.artifacts):
        yield f"artifacts.{number}", entry
    for step_number, step in enumerate(toml.steps):
        for number, entry in enumerate(step.artifacts):
            yield f"steps.{step_number}.artifacts.{number}", entry


def artifact_paths(toml: TaskToml) -> list[str]:
    paths = [entry if isinstance(entry, str) else entry.source for _, entry in _artifacts(toml)]
    return list(dict.fromkeys(paths))


def _warnings(toml: TaskToml) -> Iterator[str]:
    users = {"agent.user": toml.agent.user, "verifier.user": toml.verifier.user}
    for path, user in users.items():
        if user not in (None, "root", 0):
            yield f"{path}: a sandbox has one user, so {user!r} has no effect"
    if toml.environment.skills_dir is not None:
        yield "environment.skills_dir: the built-in agent knows no skills"
    if toml.environment.network_mode in (None, "public"):
        yield "environment.network_mode: a public network is what [harbor] public_network says"
    for path, entry in _artifacts(toml):
        if isinstance(entry, ArtifactTable) and entry.exclude:
            yield f"{path}.exclude: artifacts are copied whole"


def _image(folder: Path, path: str, table: EnvironmentTable, context: Path, name: str) -> str:
    if _dockerfile(context) is not None:
        return _name_by_digest(context, name)
    if table.docker_image is None:
        raise ConfigurationError(
            f"{folder}: the task has neither environment/Dockerfile nor environment.docker_image",
            hint="Write the Dockerfile, or set `docker_image` in [environment] of task.toml.",
        )
    if (local := find_own_file(folder, table.docker_image)) is not None:
        return str(local)
    try:
        return read_image_name(table.docker_image)
    except ImagePathError as error:
        where = f"{folder / FILE_NAME}: {path}.docker_image"
        raise ConfigurationError(
            f"{where}: {error}", hint=f"{error.hint}. An image file must be in the task's folder."
        ) from error


def _verifier_image(folder: Path, table: EnvironmentTable | None, name: str) -> str | None:
    if table is None:
        return None
    if table.docker_image is not None:
        return _image(folder, VERIFIER, table, folder / "none", name)
    context = folder / "tests"
    return _name_by_digest(context, f"{name}-verifier") if _dockerfile(context) is not None else None


def _dockerfile(context: Path) -> Path | None:
    path = context / "Dockerfile"
    return path if path.is_file() else None


def _name_by_digest(context: Path, name: str) -> str:
    """Name an image so that the name changes with every file that its build may read."""
    digest = hashlib.sha256()
    for path in sorted(context.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            mode = bool(path.stat().st_mode & 0o111)
            digest.update(f"{path.relative_to(context)}\0{mode}\0{content}\n".encode())
    return f"{name_of_reference(f'harbor-{name}')[:NAME_CHARS]}-{digest.hexdigest()[:16]}"


def _require_inside(folder: Path) -> None:
    """Refuse links that lead out: their targets would be copied into a sandbox."""
    root = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
                raise ConfigurationError(f"{path}: the link leads out of the task's folder")
