"""How often the backends of a pool change their weights' version, as they report it and as their answers say.

A frozen pool takes no weights from this service, so any change is one that somebody made at an engine.
"""

from __future__ import annotations

import structlog

from api_schemas.inference import is_frozen

log = structlog.get_logger(__name__)


class VersionWatch:
    """Counts the changes of version in one pool."""

    def __init__(self, pool: str) -> None:
        self.changes = 0
        """How often a backend had another version than before, or a new one another than the pool."""
        self._pool = pool
        self._last: int | None = None
        self._seen: dict[str, int] = {}

    def saw(self, backend_id: str, version: int) -> None:
        """Note the version of a backend."""
        before = self._seen.get(backend_id, self._last)
        self._seen[backend_id] = self._last = version
        if before in (None, version):
            return
        self.changes += 1
        if is_frozen(self._pool):
            log.warning(
                "a frozen pool has another version",
                pool=self._pool,
                backend_id=backend_id,
                version=version,
                before=before,
                hint="Find out who gave the engine weights; results before and after are of two policies.",
            )
