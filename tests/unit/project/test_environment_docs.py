"""The pages on environments are accurate: their examples are the shipped files, and they run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_service.environments.declarative.declaration import Declaration
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes import LocalConfig, make_provider

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
REFERENCE = (DOCS / "reference" / "environment-toml.md").read_text()


def blocks(page: str) -> list[str]:
    """Return the contents of a page's code blocks."""
    return re.findall(r"^```\w*\n(.*?)^```$", (DOCS / "how-to" / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["environment.toml", "init", "evaluate", "tasks.jsonl"])
def test_the_declarative_example_is_the_shipped_one(name):
    shipped = (ROOT / "examples" / "environments" / "wordcount" / name).read_text()
    assert shipped in blocks("write-an-environment.md")


async def test_the_python_example_runs(tmp_path):
    page = "write-an-environment-in-python.md"
    [source] = [block for block in blocks(page) if "class Definitions" in block]
    names = {}
    exec(compile(source, "example.py", "exec"), names)
    environment = names["environment"]
    sandboxes = SandboxSource(make_provider(LocalConfig(provider="local"), tmp_path))
    policy = ScriptedPolicy([turn("", call("lookup", word="sea")), "It is water."])
    trial = await play(environment, environment.dataset()[0], policy, sandboxes)
    assert trial.score.reward == 1.0
    assert policy.messages[2].content == "a large body of salt water"


@pytest.mark.slow
def test_the_environment_and_the_test_of_the_page_on_tests_run(tmp_path):
    environment, test = blocks("test-an-environment.md")
    (tmp_path / "stock.py").write_text(environment)
    (tmp_path / "test_stock.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in done.stdout, done.stdout


def test_every_key_is_in_the_table():
    for name in Declaration.model_fields:
        assert any(f"`{form}`" in REFERENCE for form in (name, f"[{name}]", f"[[{name}]]")), name
    for field in ("limits", "sandbox"):
        for key in Declaration.model_fields[field].annotation.model_fields:
            assert key in REFERENCE, key
