"""The backends of a service that shares its store with nobody, in a file that survives restarts and is always whole.

A file that cannot be written is logged, and the backends work until the service ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import anyio
import structlog
from pydantic import TypeAdapter, ValidationError

from api_schemas.inference import BackendSpec
from rollout_service.base.errors import ConfigurationError
from rollout_service.base.private_files import write_private
from rollout_service.base.signals import MonotonicCounter
from rollout_service.base.validation import describe_problems
from rollout_service.store.engines_contract import BackendStore, SharedBackend, end_of_lease

log = structlog.get_logger(__name__)

_SPECS = TypeAdapter(list[BackendSpec])


class FileBackends(BackendStore):
    """Backends in a JSON file; a drain lasts until the service ends, and leases begin again with it."""

    is_shared = False

    def __init__(self, path: Path, id_of: Callable[[BackendSpec], str]) -> None:
        self._path = path
        self._id_of = id_of
        self._backends: dict[str, SharedBackend] | None = None
        self._changes = MonotonicCounter(1)
        self._saving = anyio.Lock()

    async def put(self, backend: SharedBackend) -> None:
        self._known()[backend.backend_id] = backend
        await self._save()

    async def remove(self, backend_id: str) -> bool:
        if self._known().pop(backend_id, None) is None:
            return False
        await self._save()
        return True

    async def backends(self) -> Sequence[SharedBackend]:
        return list(self._known().values())

    async def wait_for_change(self, after: int) -> int:
        return await self._changes.wait_above(after)

    def _known(self) -> dict[str, SharedBackend]:
        """
        Raises:
            ConfigurationError: The file cannot be read, or is not one of this release.
        """
        if self._backends is None:
            try:
                specs = _SPECS.validate_json(self._path.read_bytes())
            except FileNotFoundError:
                specs = []
            except (OSError, ValidationError) as error:
                why = error if isinstance(error, OSError) else "; ".join(describe_problems(error, BackendSpec))
                raise ConfigurationError(
                    f"the remembered backends in {self._path} cannot be read: {why}",
                    hint="Run the release that wrote it, or move it away and register the backends again.",
                ) from error
            self._backends = {
                self._id_of(spec): SharedBackend(self._id_of(spec), spec, lease_until=end_of_lease(spec))
                for spec in specs
            }
        return self._backends

    async def _save(self) -> None:
        self._changes.increment()
        async with self._saving:  # two registrations at once would write the same draft file
            data = _SPECS.dump_json([backend.spec for backend in self._known().values()])
            try:
                await anyio.to_thread.run_sync(write_private, self._path, data)
            except OSError as error:
                log.error(
                    "the backends cannot be remembered, and have to be registered again after a restart",
                    file=str(self._path),
                    error=str(error),
                    hint="Free disk space or restore the state folder, then register any of them again.",
                )
