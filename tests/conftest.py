"""Fixtures that every test may use."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sandboxes import LocalConfig, Sandbox, SandboxSpec, make_provider

# A busy machine makes the drawing of examples slow, which says nothing about them.
settings.register_profile("patient", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("patient")


@pytest.fixture
def anyio_backend() -> str:
    """The service runs on asyncio, so its tests do too."""
    return "asyncio"


@pytest.fixture
async def local_sandbox(tmp_path: Path) -> AsyncIterator[Sandbox]:
    """A sandbox that isolates nothing and starts in a tenth of a second."""
    provider = make_provider(LocalConfig(provider="local"), tmp_path / "state")
    try:
        yield await provider.start(SandboxSpec())
    finally:
        await provider.close()
