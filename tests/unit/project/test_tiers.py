"""The plug-ins of the test suite: tiers, workers, leftovers, reports and blocks of pages."""

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import execnet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pages import blocks
from tests.support.pages.blocks import shell_blocks
from tests.support.plugins import leftovers
from tests.support.plugins.sendable_reports import escape_surrogates

ROOT = Path(__file__).parents[3]
MODULE = """
import pytest

@pytest.mark.{mark}
def test_second(): pass

@pytest.mark.{mark}
def test_other(): pass

@pytest.mark.apptainer
def test_first(): pass
"""
PAST = "1"
FUTURE = "1e12"
WORKERS = ("--dist", "loadgroup", "--no-loadscope-reorder", "-n")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Write two modules with tests of both tiers, of which the last commit touched the second's part."""
    for name, mark in (("a", "extended"), ("b", "trainers")):
        (tmp_path / f"test_{name}.py").write_text(MODULE.format(mark=mark))
    touched = tmp_path / "rollout_client" / "adapters" / "trl.py"
    touched.parent.mkdir(parents=True)
    touched.touch()
    git = ["git", "-c", "user.name=one", "-c", "user.email=one@example.org"]
    for arguments in (["init", "-q"], ["add", "rollout_client"], ["commit", "-qm", "Touch an adapter"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[list[str], str]:
    """Run the tests in a folder; return those that ran, in their order, and the whole output."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "xdist", "-p", "no:cacheprovider"]
    command += ["-p", "tests.support.plugins.tiers", "-o", "markers=extended", *arguments]
    own = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    outcomes = re.findall(r"PASSED (test_\S+)|(test_\S+) PASSED", done.stdout)
    return ["".join(names).replace(".py::test", "") for names in outcomes], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), (*WORKERS, "1")])
def test_without_time_the_second_tier_is_named_and_neither_passed_nor_failed(suite, workers):
    ran, said = run(suite, *workers, "--begin-until", PAST)
    assert ran == ["test_a_first", "test_b_first"]
    assert re.search(r"=+ 2 passed in ", said)
    left = [
        "test_a.py::test_other",
        "test_a.py::test_second",
        "test_b.py::test_other",
        "test_b.py::test_second",
    ]
    assert (suite / ".cache" / "tests-not-run.txt").read_text().split() == left
    assert "4 tests were not run" in said
    assert all(name in said for name in left)


@pytest.mark.slow
def test_the_first_tier_comes_first_and_then_what_the_last_commits_touched(suite):
    ran, said = run(suite, *WORKERS, "1", "--begin-until", FUTURE)
    assert [name[5:] for name in ran] == ["a_first", "b_first", "b_second", "b_other", "a_second", "a_other"]
    assert (suite / ".cache" / "tests-not-run.txt").read_text() == ""
    assert "not run" not in said


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "names"), [("1", {"first"}), ("2", {"second", "other"})])
def test_a_tier_leaves_the_other_out(suite, tier, names):
    ran, _ = run(suite, "--tier", tier)
    assert {name.rpartition("_")[2] for name in ran} == names
    assert len(ran) == 2 * len(names)


IMPORTING = """
import pytest
from tests.support.store.servers import PLACES

@pytest.mark.parametrize("place", PLACES)
def test_place(place): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "count"), [("1", 2), ("2", 1)])
def test_a_module_whose_parameters_are_marked_elsewhere_is_in_both_tiers(tmp_path, tier, count):
    (tmp_path / "test_places.py").write_text(IMPORTING)
    _, said = run(tmp_path, "--tier", tier)
    assert f" {count} passed" in said


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

@pytest.mark.xdist_group("engine")
@pytest.mark.slow(seconds=90)
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


@pytest.mark.slow
def test_a_worker_gets_the_longest_tests_and_groups_first(tmp_path):
    for name, text in (("a", TESTS), ("b", GROUPED)):
        (tmp_path / f"test_{name}.py").write_text(text)
    ran, _ = run(tmp_path, *WORKERS, "1")
    assert [name[7:].partition("@")[0] for name in ran] == ["grouped", "of_the_same_group", "long", "quick", "slow"]


@pytest.mark.slow
def test_tests_that_share_a_fixture_of_their_module_go_to_one_worker(tmp_path):
    (tmp_path / "test_a.py").write_text(SHARING)
    _, said = run(tmp_path, *WORKERS, "2")
    assert len(set(re.findall(r"\[(gw\d)\].*PASSED \S+::test_shared", said))) == 1
    assert said.count("@test_a") == 8  # begun and passed
    assert "test_without_it@" not in said


STUBBORN = "import signal as s, time; s.signal(s.SIGTERM, s.SIG_IGN); print('ready', flush=True); time.sleep(99)"


@pytest.mark.slow
def test_processes_of_a_run_are_ended_with_it_and_no_others(monkeypatch):
    monkeypatch.setattr(leftovers, "END_SECONDS", 0.5)

    def start(run_id: str) -> subprocess.Popen[bytes]:
        environ = os.environ | {leftovers.RUN_ID: run_id}
        command = [sys.executable, "-c", STUBBORN]
        process = stack.enter_context(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE))
        stack.callback(process.kill)
        assert process.stdout.readline() == b"ready\n"
        return process

    with ExitStack() as stack:
        left, other = start("this run"), start("another run")
        leftovers.end_processes("this run")
        assert left.poll() is not None
        assert other.poll() is None


TEXTS = st.text(alphabet="aé😀\ud800\udfff", max_size=8)
DATA = st.recursive(
    st.none() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=8,
)


@given(DATA)
def test_every_report_can_be_sent_and_differs_only_in_surrogates(data):
    sent = escape_surrogates(data)
    assert execnet.loads(execnet.dumps(sent)) == sent
    if "\\ud" not in json.dumps(data):
        assert sent == data


PAGE = """# Page
```bash
echo one
```

<!-- not run: it needs a GPU -->
```sh
serve
```

<!-- run after: touch a; touch b -->
```bash
ls a
ls b
```

```toml
[table]
```
"""


def test_a_block_is_run_unless_a_comment_says_why_not(tmp_path, monkeypatch):
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    plain, marked, after = shell_blocks("page.md")
    assert (plain.line, plain.text, plain.not_run, plain.after) == (3, "echo one\n", "", "")
    assert (marked.line, marked.not_run) == (8, "it needs a GPU")
    assert (after.text, after.after) == ("ls a\nls b\n", "touch a; touch b")
