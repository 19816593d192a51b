"""Fixtures that the tests of a running service share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """Create a folder with a short path, because sockets are created below it."""
    made = Path(tempfile.mkdtemp(prefix="service-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)
