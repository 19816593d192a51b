"""Fixtures that every test may use."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    """The service runs on asyncio, so its tests do too."""
    return "asyncio"
