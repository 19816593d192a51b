"""The engines of all services that share a Redis."""

from rollout_service.store.redis.engines.shared_engines import RedisEngines

__all__ = ["RedisEngines"]
