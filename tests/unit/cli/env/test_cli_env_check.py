"""`env check` and `env list` show an environment's own tools and splits, and problems with its image."""

import json

import pytest
from pydantic import JsonValue
from typer.testing import CliRunner

from rollout_service import __version__
from rollout_service.agents.tool_calling.tools import Arguments, FunctionTool, ToolContext
from rollout_service.cli import app
from rollout_service.cli.doctor.checks import check_secrets
from rollout_service.cli.env.check import tool_names
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.episodes import Episode, Score
from rollout_service.settings import Settings


class Word(Arguments):
    word: str


async def lookup(arguments: Word, context: ToolContext) -> str:
    return arguments.word


class Plain(AgentEnvironment):
    async def evaluate(self, episode: Episode) -> Score:
        return Score(0.0)


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def folder(path, dataset: list[JsonValue], command: str = "true", image: str = "base"):
    path.mkdir()
    head = f'name = "mine"\nimage = "{image}"\n'
    tables = f'[evaluate]\ncommand = "{command}"\n[dataset]\npath = "tasks.jsonl"\n'
    (path / "environment.toml").write_text(head + tables)
    (path / "tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in dataset))
    return str(path)


def test_tools_of_its_own_are_named():
    spec = EnvironmentSpec(name="x", tools=["finish"])
    environment = Plain(spec, extra_tools=[FunctionTool("lookup", "Look up.", Word, lookup)])
    assert tool_names(environment) == ["finish", "lookup"]


@pytest.mark.slow
def test_splits_are_counted(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_IMAGES_DIR", str(tmp_path))
    (tmp_path / "base.sif").touch()  # nothing looks into it
    report = json.loads(invoke("env", "check", "calc", "--json").stdout)
    assert report["splits"] == {"held_out": 128, "train": 4_096}
    assert report["tools"] == ["python"]
    assert "4224 instances (held_out 128, train 4096)" in invoke("env", "check", "calc").stdout


def test_faults_of_an_environment_are_found(tmp_path):
    dataset = [{"question": "a", "split": "train"}, {"question": "b"}, {"answer": "c", "split": "train"}]
    path = folder(tmp_path / "mine", dataset, "bash /environment/grade.sh", "none-such")
    result = invoke("env", "check", path)
    assert result.exit_code == 1
    for text in (
        "[evaluate] command: /environment/grade.sh does not exist",
        "image: ",
        "data set, instance 3: ",
        "data set: 1 instance without a split",
        "4 findings",
    ):
        assert text in result.stdout


def test_instances_that_make_large_batches_are_a_warning(tmp_path):
    texts = ["a", "b" * 1_500_000, "c" * 2_500_000]
    path = folder(tmp_path / "mine", [{"question": text} for text in texts])
    said = invoke("env", "check", path).stdout
    assert "warning: data set: 2 instances of over 1 MB, of which number 3 has 2.5 MB" in said


@pytest.mark.slow
def test_secrets_are_named_with_whether_they_can_be_had_and_without_values(tmp_path, monkeypatch):
    path = folder(tmp_path / "mine", [{"question": "a"}])
    asked = '{ A = { variable = "ALLOWED_KEY" }, B = { variable = "OTHER_KEY" }, C = { file = "c.key" } }'
    with (tmp_path / "mine" / "environment.toml").open("a") as file:
        file.write(f"[evaluate.secrets]\nA = {{ variable = 'ALLOWED_KEY' }}\n[sandbox]\nsecrets = {asked}\n")
    monkeypatch.setenv("ALLOWED_KEY", "value-of-a-key")
    monkeypatch.setenv("OTHER_KEY", "value-of-another-key")
    monkeypatch.setenv("ROLLOUT_SECRETS__VARIABLES", '["ALLOWED_KEY"]')

    said = invoke("env", "check", path).stdout
    report = json.loads(invoke("env", "check", path, "--json").stdout)
    [of_sandboxes] = check_secrets(Settings(environments=[path], secrets={"variables": ["ALLOWED_KEY"]}))

    assert "[evaluate] A from the variable ALLOWED_KEY: allowed and present" in said
    assert "[sandbox] B from the variable OTHER_KEY: not usable" in said
    assert "environments may not have the variable OTHER_KEY (If you trust them" in said
    assert [(one["table"], one["key"], one["usable"]) for one in report["secrets"]] == [
        ("[sandbox]", "A", True),
        ("[sandbox]", "B", False),
        ("[sandbox]", "C", False),
        ("[evaluate]", "A", True),
    ]
    assert (of_sandboxes.name, of_sandboxes.state) == ("secrets of mine", "limited")
    assert "OTHER_KEY" in of_sandboxes.found
    assert "value-of" not in said + json.dumps(report) + str(of_sandboxes)


def test_the_version_is_printed():
    assert invoke("--version").stdout == f"rollout-service {__version__}\n"
