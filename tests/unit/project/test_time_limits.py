"""A test that hangs, or whose fixture does, fails by name with the stacks in the log, and the run goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CONFTEST = """
from tests.support.plugins import time_limits

time_limits.CLOSING_SECONDS = 2

def pytest_configure(config):
    config.pluginmanager.register(time_limits)
"""
HANGING = """
from pathlib import Path

import anyio
import pytest


@pytest.fixture
def anyio_backend():
    return "asyncio"

async def a_request_that_never_ends():
    await anyio.sleep_forever()

@pytest.fixture
async def engine():
    yield
    Path("engine closed").touch()

@pytest.fixture
async def first_broken_engine():
    yield
    await a_request_that_never_ends()

@pytest.fixture
async def second_broken_engine(first_broken_engine):
    yield
    await a_request_that_never_ends()

async def test_hangs(engine):
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(a_request_that_never_ends)

async def test_fails_and_its_fixtures_hang(second_broken_engine):
    raise RuntimeError("the first failure")

@pytest.mark.parametrize("number", range(4))
async def test_passes(engine, number):
    pass
"""
STACK = "in a_request_that_never_ends\n    await anyio.sleep_forever()\n"


def test_tests_and_fixtures_that_hang_fail_with_their_stacks_and_the_run_continues(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_hanging.py").write_text(HANGING)
    plugins = ["-p", "anyio", "-o", "anyio_mode=auto", "-p", "pytest_timeout", "-p", "xdist"]
    options = ["-n", "2", "--timeout", "5", "-o", f"pythonpath={ROOT}", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, *options]
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    log = tmp_path / "log"
    with log.open("wb") as output:
        ended = subprocess.run(
            command, cwd=tmp_path, env=environ, stdout=output, stderr=output, timeout=120, check=False
        )
    said = log.read_text()
    assert ended.returncode == 1, said
    assert "4 passed" in said
    assert (tmp_path / "engine closed").exists()
    for name in ("test_hangs", "test_fails_and_its_fixtures_hang"):
        stacks = said.partition(f"test_hanging.py::{name} took too long\n")[2]
        assert STACK in stacks, said
        assert f"FAILED test_hanging.py::{name}" in said
    assert "TimeoutError: the test took more than 5.0 s; all stacks are in the log" in said
    assert "RuntimeError: the first failure" in said
    assert "crashed while running 'test_hanging.py::test_fails_and_its_fixtures_hang'" in said
