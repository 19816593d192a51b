"""A test worker gets the longest tests first, as their marks say."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CONFTEST = """
import pytest
from tests.support.plugins.longest_first import longest_first

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
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


def test_a_worker_gets_the_longest_tests_and_groups_first(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "test_b.py").write_text(GROUPED)
    options = ["-v", "-n", "1", "--dist", "loadgroup", "--no-loadscope-reorder", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-o", f"pythonpath={ROOT}", *options]
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    ran = re.findall(r"PASSED \S+::(\w+)", done.stdout)
    assert ran == ["test_grouped", "test_of_the_same_group", "test_long", "test_quick", "test_slow"]
