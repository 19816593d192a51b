"""NeMo Gym as a library of its own, with the mounts that a sandbox needs to run it, and a data set of its rows.

Guarantee: once it is installed, each server of the data set has begun a session here, without ray or a head server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from rollout_service.environments.bridges.process import library_process, run_while_installing
from rollout_service.environments.libraries import Library

NAME: Final = "nemo-gym"
TASKS: Final = "tasks.jsonl"
INTERPRETER: Final = "interpreter.json"
WORKER: Final = Path(__file__).with_name("worker.py")
BEGIN_SECONDS: Final = 300.0
INSIDE: Final = "/opt/nemo-gym"
PYTHON: Final = f"{INSIDE}/python"
PACKAGES: Final = f"{INSIDE}/packages"
SERVERS: Final = (
    *("example_multi_step", "example_session_state_mgmt", "example_multi_turn_gymnasium"),
    *("workplace_assistant", "mcqa", "gpqa_diamond", "equivalence_rule", "graphwalks", "ruler"),
    *("math_with_judge", "xlam_fc"),
)
"""They run with these packages alone, and need neither a network nor a model."""
HELD_OUT: Final = 1


def write_tasks(folder: Path) -> None:
    packages = next(folder.glob("lib/python3.*/site-packages"))
    tasks = {server: list(_examples(packages, server)) for server in SERVERS}

    async def begin() -> dict[str, Any]:
        async with library_process([folder / "bin" / "python", "-sP", "-W", "ignore", WORKER], NAME) as process:
            for server in SERVERS:
                row = tasks[server][0]["row"]
                await process.ask({"op": "begin", "server": server, "row": row, "config": {}}, BEGIN_SECONDS)
            return await process.ask({"op": "interpreter"}, BEGIN_SECONDS)

    python = run_while_installing(begin, f"{NAME} does not work here")
    (folder / INTERPRETER).write_text(json.dumps(python))
    lines = (json.dumps(task) for server in SERVERS for task in tasks[server])
    (folder / TASKS).write_text("\n".join(lines) + "\n")


def _examples(packages: Path, server: str) -> Iterator[dict[str, Any]]:
    text = (packages / "resources_servers" / server / "data" / "example.jsonl").read_text()
    rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    for number, row in enumerate(rows):
        split = "train" if number < len(rows) - HELD_OUT else "held_out"
        yield {"server": server, "row": row, "split": split}


def binds(library: Library) -> dict[str, str]:
    if not library.is_installed:
        return {}
    python = _interpreter(library.folder / INTERPRETER)
    shared = {f"{PYTHON}/lib/{Path(path).name}": path for path in python["shared"]}
    return {
        PACKAGES: str(library.packages),
        f"{PYTHON}/bin/python3": python["executable"],
        f"{PYTHON}/lib/python{python['version']}": python["library"],
        **shared,
    }


def servers(library: Library) -> frozenset[str]:
    library.python()
    return _servers(library.packages / "resources_servers")


@cache
def _servers(folder: Path) -> frozenset[str]:
    return frozenset(path.parent.name for path in folder.glob("*/app.py"))


@cache
def _interpreter(path: Path) -> dict[str, Any]:
    python: dict[str, Any] = json.loads(path.read_text())
    return python


NEMO_GYM: Final = Library(
    NAME, Path(__file__).with_name("requirements.lock"), prepare=write_tasks, python_version=(3, 12)
)
