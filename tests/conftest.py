"""Fixtures that every test may use."""

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from sandboxes import ApptainerConfig, LocalConfig, Sandbox, SandboxProvider, SandboxSpec, make_provider
from tests.support.clocks import ManualClock
from tests.support.plugins.parts import PARTS
from tests.support.redis_cluster import RedisCluster
from tests.support.redis_server import RedisServer, redis_server
from tests.support.store.servers import STORE_SERVER, STORE_SERVERS

# On a busy machine, drawing examples is slow for reasons that have nothing to do with the examples.
settings.register_profile("deep", suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=100)
settings.register_profile("usual", settings.get_profile("deep"), max_examples=30)
settings.register_profile("fast", settings.get_profile("deep"), max_examples=10)
settings.load_profile("usual")

# Rich's tracebacks, which structlog writes by default, take up to a second each.
structlog.configure([structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)])

# Background jobs ignore both signals, and so would every child that a test wants to interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

pytest_plugins = [f"tests.support.plugins.{name}" for name in ("leftovers", "sendable_reports", "tiers", "time_limits")]
PART_NAMES = frozenset(part.name for part in PARTS)


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Name the real parts of the selected tests, for `scripts/test` to install."""
    if not config.option.collectonly:
        return []
    marked = {mark.name for item in items for mark in item.iter_markers()}
    return [f"real parts: {' '.join(sorted(marked & PART_NAMES))}"]


@pytest.fixture
def anyio_backend() -> str:
    """Run tests on asyncio, as the service does."""
    return "asyncio"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def folder() -> Iterator[Path]:
    """Create a folder with a short path, because sockets are created below it."""
    made = Path(tempfile.mkdtemp(prefix="service-", dir="/tmp"))
    made.chmod(0o755)  # sandboxes run as another user, who must reach theirs
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def local_sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    """Start a sandbox that isolates nothing; this takes a tenth of a second."""
    provider = make_provider(LocalConfig(provider="local"), tmp_path / "state")
    try:
        yield await provider.start(SandboxSpec())
    finally:
        await provider.close()


@pytest.fixture
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    """Start sandboxes in Apptainer for tests that are marked so, else on the host itself; none may be left."""
    marked = request.node.get_closest_marker("apptainer")
    config = ApptainerConfig() if marked else LocalConfig(provider="local")
    made = make_provider(config, tmp_path / "state")
    yield made
    assert made.live() == []
    await made.close()


@pytest.fixture
def sandboxes(provider: SandboxProvider) -> Any:
    from rollout_service.pipeline.sandbox_source import SandboxSource  # which imports half of the service

    return SandboxSource(provider)


@pytest.fixture(scope="session")
def renderer() -> Any:
    """Return the chat format of a shipped policy."""
    from rollout_service.engines.shipped import policy_folder  # which imports transformers' tokenizers
    from rollout_service.tokens import ChatRenderer

    return ChatRenderer.load(policy_folder("calc-tuned"))


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer | RedisCluster]:
    """Run one Redis per worker, for tests that leave it as it is; each takes a prefix of its own (`config()`)."""
    with STORE_SERVERS[os.environ.get(STORE_SERVER, "redis")]() as server:
        yield server


@pytest.fixture(scope="session")
def shared_shards(shared_redis: RedisServer | RedisCluster) -> Iterator[list[RedisServer | RedisCluster]]:
    """Return two of them for the shards of a store: two servers, or one cluster twice."""
    if isinstance(shared_redis, RedisCluster):
        yield [shared_redis, shared_redis]
        return
    with STORE_SERVERS[os.environ.get(STORE_SERVER, "redis")]() as other:
        yield [shared_redis, other]


@pytest.fixture(scope="session")
def shared_objects() -> Iterator[Any]:
    """Run one object store per worker, for tests that leave it as it is; each takes a prefix of its own."""
    from tests.support.store.object_server import object_server  # which imports the AWS client

    with object_server() as server:
        yield server


@pytest.fixture
def as_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the keys of the user that may read and write one bucket of an object store."""
    from tests.support.store.object_server import SERVICE, keys

    for name, value in keys(SERVICE).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """Run a Redis that the test may break."""
    with redis_server() as server:
        yield server
