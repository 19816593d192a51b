"""Both providers of this package keep the sandbox contract."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandboxes import ApptainerConfig, LocalConfig, SandboxProvider, make_provider
from sandboxes.conformance import CHECKS, ISOLATION_CHECKS, Check, run_check

pytestmark = pytest.mark.anyio


@pytest.fixture
async def local(tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    provider = make_provider(LocalConfig(provider="local"), tmp_path)
    yield provider
    await provider.close()


@pytest.fixture
async def apptainer(tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    provider = make_provider(ApptainerConfig(), tmp_path)
    yield provider
    await provider.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_local(local: SandboxProvider, check: Check) -> None:
    await run_check(check, local)


@pytest.mark.apptainer
@pytest.mark.parametrize("check", [*CHECKS, *ISOLATION_CHECKS], ids=lambda check: check.__name__)
async def test_apptainer(apptainer: SandboxProvider, check: Check) -> None:
    await run_check(check, apptainer)
