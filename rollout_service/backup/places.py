"""Where the state of services is: their state folders, and the stores that they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rollout_service.base import state_files
from rollout_service.settings import Settings

if TYPE_CHECKING:  # the package of Redis may be missing
    from rollout_service.store.redis import RedisConfig

ONLY = "state"
"""The name of a state folder that is alone."""


@dataclass(frozen=True, slots=True)
class Places:
    """The places that a backup is made of, or restored to."""

    states: Mapping[str, Path]
    """State folders, by the names that they have in a backup."""
    owns_store: bool = True
    """Whether the store is in the state folder, which is then the only one."""
    redis: RedisConfig | None = None
    """The store that services share; None if there is none, or if it is in another backup."""
    folder: Path | None = None
    """The shared folder of that store, if it has one."""
    documents: Mapping[str, Path] = field(default_factory=dict)
    """Other files, by their paths in a backup; restoring one replaces it."""

    @property
    def databases(self) -> tuple[str, ...]:
        """The names of the databases in a state folder."""
        return state_files.DATABASES if self.owns_store else (state_files.LIVE_STORE,)

    @classmethod
    def of(cls, settings: Settings, *, with_store: bool = True) -> Self:
        """Return the places of the node with these settings; `with_store` includes a store that it shares."""
        states, url = {ONLY: settings.state_dir.expanduser()}, settings.store.url
        if url is None:
            return cls(states)
        if not with_store:
            return cls(states, owns_store=False)
        from rollout_service.store.redis import RedisConfig

        redis = RedisConfig.of(settings.store, url)
        return cls(states, owns_store=False, redis=redis, folder=settings.store.folder)
