"""Fixtures that the modules of this folder share."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollout_service.pipeline.sandbox_source import SandboxSource
from sandboxes import ApptainerConfig, make_provider
from tests.support.openenv.process import RealOpenEnv, real_openenv


@pytest.fixture(scope="session")
def real() -> Iterator[RealOpenEnv]:
    """Run servers and the client of the real OpenEnv; its import takes seconds, so all tests share the process."""
    with real_openenv() as process:
        yield process


@pytest.fixture
async def sandboxes(tmp_path: Path) -> AsyncIterator[SandboxSource]:
    """Start sandboxes in Apptainer; none may be left."""
    provider = make_provider(ApptainerConfig(), tmp_path / "state")
    yield SandboxSource(provider)
    assert provider.live() == []
    await provider.close()
