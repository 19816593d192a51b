"""The store in one SQLite file."""

from rollout_service.store.sqlite.store import SqliteStore

__all__ = ["SqliteStore"]
