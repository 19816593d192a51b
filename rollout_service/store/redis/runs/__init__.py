"""Runs, groups and batches in Redis."""

from rollout_service.store.redis.runs.store import RedisRuns

__all__ = ["RedisRuns"]
