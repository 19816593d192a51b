"""Test workers get the longest tests first, and the tests that share a fixture together."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONFTEST = """
import pytest
from tests.support.plugins.workers import keep_together, longest_first

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items):
    keep_together(items)
    yield
    longest_first(items)
"""
TESTS = """
import pytest

def test_quick(): pass

@pytest.mark.xdist_group("engine")
def test_grouped(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.slow(seconds=60)
def test_long(): pass
"""
GROUPED = """
import pytest

pytestmark = [pytest.mark.xdist_group("engine"), pytest.mark.slow(seconds=90)]

def test_of_the_same_group(): pass
"""
SHARING = """
import pytest

@pytest.fixture(scope="module")
def server(): return object()

@pytest.fixture
def client(server): return server

@pytest.mark.parametrize("number", range(4))
def test_shared(client, number): pass

def test_without_it(): pass
"""


def run(folder: Path, workers: int, **modules: str) -> str:
    for name, text in ({"conftest": CONFTEST} | modules).items():
        (folder / f"{name}.py").write_text(text)
    options = ["-v", "-n", str(workers), "--dist", "loadgroup", "--no-loadscope-reorder"]
    options += ["-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-o", f"pythonpath={ROOT}", *options]
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_worker_gets_the_longest_tests_and_groups_first(tmp_path):
    printed = run(tmp_path, 1, test_a=TESTS, test_b=GROUPED)
    ran = re.findall(r"PASSED \S+::(\w+)", printed)
    assert ran == ["test_grouped", "test_of_the_same_group", "test_long", "test_quick", "test_slow"]


def test_tests_that_share_a_fixture_of_their_module_go_to_one_worker(tmp_path):
    printed = run(tmp_path, 2, test_a=SHARING)
    assert len(set(re.findall(r"\[(gw\d)\].*PASSED \S+::test_shared", printed))) == 1
    assert printed.count("@test_a") == 8  # begun and passed
    assert "test_without_it@" not in printed
