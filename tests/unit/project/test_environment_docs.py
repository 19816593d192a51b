"""docs/environments.md says what is so: its examples are the files of the example, and they run."""

import re
from pathlib import Path

import pytest

from rollout_service.environments.declarative.declaration import Declaration
from rollout_service.environments.trial import play
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes import LocalConfig, make_provider

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]
DOCUMENT = (ROOT / "docs" / "environments.md").read_text()
BLOCKS = re.findall(r"^```\w*\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["environment.toml", "init", "evaluate", "tasks.jsonl"])
def test_the_declarative_example_is_the_shipped_one(name):
    assert (ROOT / "examples" / "environments" / "wordcount" / name).read_text() in BLOCKS


async def test_the_python_example_runs(tmp_path):
    [source] = [block for block in BLOCKS if "class Definitions" in block]
    names = {}
    exec(compile(source, "example.py", "exec"), names)
    environment = names["environment"]
    sandboxes = SandboxSource(make_provider(LocalConfig(provider="local"), tmp_path))
    policy = ScriptedPolicy([turn("", call("lookup", word="sea")), "It is water."])
    trial = await play(environment, environment.dataset()[0], policy, sandboxes)
    assert trial.score.reward == 1.0
    assert policy.messages[2].content == "a large body of salt water"


def test_every_key_is_in_the_table():
    for name in Declaration.model_fields:
        assert f"`{name}`" in DOCUMENT or f"`[{name}]`" in DOCUMENT, name
    for field in ("limits", "sandbox"):
        for key in Declaration.model_fields[field].annotation.model_fields:
            assert key in DOCUMENT, key
