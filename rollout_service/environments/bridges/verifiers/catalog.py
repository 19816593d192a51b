"""The tasks and tools of tasksets, as verifiers lists them on this host.

Guarantees: packages of tasksets are imported in a process of their own; answers are cached as long as the declaration,
the packages and the library stay the same.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from api_schemas.trajectories import Message
from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.bridges.process import library_process, run_while_installing
from rollout_service.environments.bridges.verifiers.declaration import TasksetTable
from rollout_service.environments.libraries import Library
from rollout_service.tokens import ToolSpec
from sandboxes.config import default_cache

LIST_SECONDS: Final = 1_800.0
"""Tasksets may download their data."""
LAST_WORDS_CHARS: Final = 2_000


class ListedTask(BaseModel):
    model_config = ConfigDict(frozen=True)

    problem: str | None = None
    """If the task cannot be run here; other fields are then empty."""
    key: str = ""
    """The library's name, which changes with the content."""
    data: dict[str, JsonValue] = {}
    messages: list[Message] = []
    agent_seconds: float | None = None
    scoring_seconds: float | None = None


class Listing(BaseModel):
    model_config = ConfigDict(frozen=True)

    problem: str | None = None
    """If the taskset cannot be used here; other fields are then empty."""
    tools: list[ToolSpec] = []
    task_type: str = ""
    data_type: str = ""
    tasks: list[ListedTask] = []


class _Listings(BaseModel):
    tasksets: list[Listing]


def list_tasksets(
    library: Library, tables: Sequence[TasksetTable], packages: Sequence[Path], folder: Path
) -> list[Listing]:
    """Return a listing for each table. Call it in a thread: it may take minutes.

    Raises:
        ConfigurationError: The library is not installed, or it ended.
    """
    request = {
        "op": "list",
        "tasksets": [table.model_dump(include={"id", "config", "limit"}) for table in tables],
    }
    python = library.python()
    line = json.dumps(request).encode() + b"\n"
    path = default_cache() / "tasksets" / f"{_fingerprint(library, line, packages)}.json"
    try:
        return _Listings.model_validate_json(path.read_bytes()).tasksets
    except (OSError, ValidationError):
        written = _ask([str(python), "-I", str(WORKER), *map(str, packages)], line, folder)
    try:
        listings = _Listings.model_validate_json(written).tasksets
    except ValidationError as error:
        said = written[:LAST_WORDS_CHARS].decode(errors="replace")
        raise ConfigurationError(f"the tasksets of {folder} cannot be listed: {said}") from error
    if not any(listing.problem for listing in listings):  # what is missing may be there next time
        _keep(path, written)
    return listings


def _ask(command: list[str], line: bytes, folder: Path) -> bytes:
    try:
        done = subprocess.run(command, input=line, capture_output=True, check=False, timeout=LIST_SECONDS, cwd=folder)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"the tasksets of {folder} cannot be listed: {error}") from error
    if done.returncode != 0 or not done.stdout:
        said = done.stderr.decode(errors="replace").strip()[-LAST_WORDS_CHARS:]
        raise ConfigurationError(f"{NAME} ended while it listed the tasksets of {folder}: {said}")
    return done.stdout


def _keep(path: Path, written: bytes) -> None:
    """Keep a listing; where there is no room for it, it is made again next time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            (draft := Path(folder) / path.name).write_bytes(written)
            draft.replace(path)


def _fingerprint(library: Library, line: bytes, packages: Sequence[Path]) -> str:
    digest = hashlib.sha256(b"\0".join([library.folder.name.encode(), WORKER.read_bytes(), line]))
    for package in packages:
        for path in sorted(one for one in package.rglob("*") if one.is_file() and one.suffix != ".pyc"):
            facts: Any = path.stat()
            digest.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


NAME: Final = "verifiers"
WORKER: Final = Path(__file__).with_name("worker.py")
IMPORT_SECONDS: Final = 600.0
"""The first import compiles 2,000 modules."""


def compile_modules(folder: Path) -> None:
    """Call it during the installation: sandboxes cannot keep compiled modules."""

    async def ready() -> None:
        async with library_process([folder / "bin" / "python", "-I", WORKER], NAME) as process:
            await process.ask({"op": "ready"}, IMPORT_SECONDS)

    run_while_installing(ready, f"{NAME} cannot be imported")


VERIFIERS: Final = Library(NAME, Path(__file__).with_name("requirements.lock"), prepare=compile_modules)
