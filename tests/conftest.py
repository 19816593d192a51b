"""Fixtures that every test may use."""

import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sandboxes import LocalConfig, Sandbox, SandboxSpec, make_provider
from tests.support.plugins.parts import PARTS
from tests.support.redis_server import RedisServer, redis_server

# On a busy machine, drawing examples is slow for reasons that have nothing to do with the examples.
settings.register_profile(
    "deep", suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=100
)
settings.register_profile("usual", settings.get_profile("deep"), max_examples=30)
settings.register_profile("fast", settings.get_profile("deep"), max_examples=10)
settings.load_profile("usual")

# Background jobs ignore both signals, and so would every child that a test wants to interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)

pytest_plugins = [
    f"tests.support.plugins.{name}" for name in ("leftovers", "sendable_reports", "tiers", "time_limits")
]
PART_NAMES = frozenset(part.name for part in PARTS)
NOT_FAST = PART_NAMES | {"extended", "slow", "torch"}
"""Markers of tests that `--fast` leaves out."""
MODULE_MARKS = re.compile(r"^pytestmark = (?:\[[^]]*]|.*)", re.MULTILINE)
FAST_FOLDER = Path(__file__).parent / "unit"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="only unit tests that are quick and need no real part"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        settings.load_profile("fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of modules that `--fast` leaves out as a whole: torch alone takes seconds."""
    if not config.getoption("--fast") or collection_path.suffix != ".py":
        return None
    found = MODULE_MARKS.search(collection_path.read_text())
    return True if found and NOT_FAST & set(re.findall(r"mark\.(\w+)", found[0])) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        fast, left_out = [], []
        for item in items:
            (fast if _is_fast(item) else left_out).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = fast


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Name the real parts of the selected tests, for `scripts/test` to install."""
    if not config.option.collectonly:
        return []
    marked = {mark.name for item in items for mark in item.iter_markers()}
    return [f"real parts: {' '.join(sorted(marked & PART_NAMES))}"]


def _is_fast(item: pytest.Item) -> bool:
    return FAST_FOLDER in item.path.parents and not NOT_FAST & {mark.name for mark in item.iter_markers()}


@pytest.fixture
def anyio_backend() -> str:
    """Run tests on asyncio, as the service does."""
    return "asyncio"


@pytest.fixture
async def local_sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    """Start a sandbox that isolates nothing; this takes a tenth of a second."""
    provider = make_provider(LocalConfig(provider="local"), tmp_path / "state")
    try:
        yield await provider.start(SandboxSpec())
    finally:
        await provider.close()


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """Run one Redis per worker, for tests that leave it as it is; each takes a prefix of its own (`config()`)."""
    with redis_server() as server:
        yield server
