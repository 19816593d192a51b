"""The durable store: rollouts, results, events, and the queue."""

from rollout_service.store.contract import Lease, Store
from rollout_service.store.sqlite.store import SqliteStore

__all__ = ["Lease", "SqliteStore", "Store"]
