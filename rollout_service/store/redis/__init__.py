"""The store in Redis, which the services of many nodes share."""

from rollout_service.store.redis.config import Durability, RedisConfig
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.redis.store import RedisStore

__all__ = ["Durability", "RedisConfig", "RedisConnection", "RedisStore"]
