"""verifiers as a library of its own, with its modules compiled when it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import anyio

from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError
from rollout_service.environments.bridges.process import library_process
from rollout_service.environments.libraries import Library

NAME: Final = "verifiers"
WORKER: Final = Path(__file__).with_name("worker.py")
IMPORT_SECONDS: Final = 600.0
"""The limit of the first import, which compiles 2,000 modules."""


def compile_modules(folder: Path) -> None:
    """Import the library while it is installed: sandboxes cannot keep what they compile, and would each do it again.

    Raises:
        ConfigurationError: The library does not work.
    """

    async def ready() -> None:
        async with library_process([folder / "bin" / "python", "-I", WORKER], NAME) as process:
            await process.ask({"op": "ready"}, IMPORT_SECONDS)

    try:
        anyio.run(ready)
    except EnvironmentFailedError as error:
        raise ConfigurationError(f"{NAME} cannot be imported: {error}", hint=error.hint) from error


VERIFIERS: Final = Library(NAME, Path(__file__).with_name("requirements.lock"), prepare=compile_modules)
