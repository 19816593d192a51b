"""A part of the shared Redis for each test."""

import pytest

from rollout_service.store.redis import RedisConfig
from tests.support.redis_server import RedisServer


@pytest.fixture
def config(shared_redis: RedisServer) -> RedisConfig:
    return shared_redis.config()
