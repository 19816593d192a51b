"""A test worker gets the longest tests first, and every test that is listed as one exists."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support.plugins.longest_first import LONGEST

TESTS = Path(__file__).parents[2]
CONFTEST = """
import pytest
from tests.support.plugins.longest_first import longest_first

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    longest_first(items)
"""
GROUPED = """
import pytest

@pytest.mark.xdist_group("vllm")
def test_grouped(): pass

def test_alone(): pass
"""


def run_pytest(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_a_worker_gets_the_longest_tests_first(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text(GROUPED)
    (tmp_path / "test_kill9.py").write_text("def test_b(): pass\n")
    (tmp_path / "test_adapter_trl.py").write_text("def test_c(): pass\n")
    order = ["-o", f"pythonpath={TESTS.parent}", "-n", "1", "--dist", "loadgroup", "--no-loadscope-reorder"]
    done = run_pytest("-v", *order, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    ran = re.findall(r"PASSED \S+::(\w+)", done.stdout)
    assert ran == ["test_c", "test_grouped", "test_b", "test_alone"]


def test_the_modules_given_first_exist() -> None:
    modules = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    groups = set(re.findall(r'xdist_group\("([^"]+)"\)', "".join(modules.values())))
    assert set(LONGEST) <= groups | set(modules)
