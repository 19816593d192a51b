"""Fixtures that the modules of this folder share."""

from collections.abc import Iterator

import pytest

from tests.support.openenv.process import RealOpenEnv, real_openenv


@pytest.fixture(scope="session")
def real() -> Iterator[RealOpenEnv]:
    """Run servers and the client of the real OpenEnv; its import takes seconds, so all tests share the process."""
    with real_openenv() as process:
        yield process
