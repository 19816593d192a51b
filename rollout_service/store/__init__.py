"""The durable store: rollouts, results, events, and the queue. Each implementation is a package of its own."""

from rollout_service.store.contract import Lease, Store

__all__ = ["Lease", "Store"]
