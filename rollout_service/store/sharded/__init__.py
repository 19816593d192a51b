"""A store spread over several shards, each a Redis or a slot of a cluster."""

from rollout_service.store.sharded.store import ShardedStore

__all__ = ["ShardedStore"]
