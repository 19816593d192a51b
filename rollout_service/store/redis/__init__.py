"""The store in Redis, which the services of many nodes share."""

from rollout_service.base.errors import ConfigurationError
from sandboxes.extras import extra_hint

try:
    import redis  # noqa: F401 - everything below needs it
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"a store in Redis needs the package {error.name}, which is not installed",
        hint=f"{extra_hint('redis')}.",
    ) from error

from rollout_service.store.redis.config import Durability, RedisConfig
from rollout_service.store.redis.connection import RedisConnection
from rollout_service.store.redis.store import RedisStore

__all__ = ["Durability", "RedisConfig", "RedisConnection", "RedisStore"]
