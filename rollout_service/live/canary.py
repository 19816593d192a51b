"""Which pool serves a new session, while a share of them tries a candidate for a pool's weights.

A session stays with the pool that it began in, unless that is not served for long; the same session gets the same
answer while nothing is changed; raising the share moves no session back. A change is on disk before it has an effect. A
removed candidate is remembered with its pool, so that the turns that it served still reach that pool's runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict, ValidationError

from api_schemas.sessions import Canary
from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.base.private_files import write_private

_RANGE = 1 << 64
ABANDONED_SECONDS = 120.0
"""After so long without an engine, a candidate's sessions go on in the main pool. Engines may restart meanwhile."""


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid")

    canaries: list[Canary] = []
    candidates: dict[str, str] = {}
    """By candidate, the pool that it is for, or was."""


class Canaries:
    def __init__(self, path: Path, is_served: Callable[[str], bool]) -> None:
        """`is_served` tells whether a pool has an engine in service."""
        self._path = path
        self._is_served = is_served
        self._unserved_since: dict[str, float] = {}
        self._saved = _read(path)
        self._lock = anyio.Lock()

    def list(self) -> Sequence[Canary]:
        return sorted(self._saved.canaries, key=lambda one: one.pool)

    def choose(self, pool: str, session_id: str) -> str:
        """Return the candidate for its share of new sessions, if an engine serves it."""
        for canary in self._saved.canaries:
            is_chosen = canary.pool == pool and _place(session_id) < canary.share
            if is_chosen and self._is_served(canary.candidate):
                return canary.candidate
        return pool

    def main_of(self, pool: str) -> str:
        """Return the pool that a candidate is or was for; another pool itself."""
        return self._saved.candidates.get(pool, pool)

    def abandoned(self, now: float) -> Mapping[str, str]:
        """Return candidates that were long not served, with the pools that take their sessions over."""
        known, candidates = self._unserved_since, self._saved.candidates
        self._unserved_since = {one: known.get(one, now) for one in candidates if not self._is_served(one)}
        long = (one for one, since in self._unserved_since.items() if now >= since + ABANDONED_SECONDS)
        return {one: candidates[one] for one in long}

    async def set(self, canary: Canary) -> None:
        """Replace the pool's former share.

        Raises:
            InvalidFieldError: The candidate is the pool itself, has a candidate of its own, or serves another pool.
        """
        async with self._lock:
            self._check(canary)
            others = [one for one in self._saved.canaries if one.pool != canary.pool]
            candidates = self._saved.candidates | {canary.candidate: canary.pool}
            candidates.pop(canary.pool, None)
            await self._save(_Saved(canaries=[*others, canary], candidates=candidates))

    async def remove(self, pool: str) -> bool:
        """Return whether there was a canary."""
        async with self._lock:
            others = [one for one in self._saved.canaries if one.pool != pool]
            if len(others) == len(self._saved.canaries):
                return False
            await self._save(self._saved.model_copy(update={"canaries": others}))
            return True

    def _check(self, canary: Canary) -> None:
        problem = ""
        if canary.candidate == canary.pool:
            problem = "a pool cannot be its own candidate"
        others = [one for one in self._saved.canaries if one.pool != canary.pool]
        pools = (canary.pool, canary.candidate)
        if any(one.pool == canary.candidate or one.candidate in pools for one in others):
            problem = "the pools are those of another canary"
        if problem:
            hint = "Register the engines with the candidate's weights under a pool of their own."
            raise InvalidFieldError.at("candidate", problem, hint=hint)

    async def _save(self, saved: _Saved) -> None:
        content = saved.model_dump_json(indent=2).encode()
        await anyio.to_thread.run_sync(write_private, self._path, content)
        self._saved = saved


def _place(session_id: str) -> float:
    """Return a number between 0 and 1 that never changes."""
    digest = hashlib.sha256(session_id.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8]) / _RANGE


def _read(path: Path) -> _Saved:
    try:
        return _Saved.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return _Saved()
    except (OSError, ValidationError) as error:
        hint = "Repair the file, or remove it: all new sessions then go to the pool that they ask for."
        raise ConfigurationError(f"the canaries in {path} cannot be read: {error}", hint=hint) from error
