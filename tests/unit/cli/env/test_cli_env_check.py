"""`env check` and `env list` show an environment's own tools and splits, and problems with its image."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from pydantic import JsonValue
from typer.testing import CliRunner

from rollout_service import __version__
from rollout_service.agents.tool_calling.tools import Arguments, FunctionTool, ToolContext
from rollout_service.cli import app
from rollout_service.cli.doctor.checks import check_secrets
from rollout_service.cli.env.check import tool_names
from rollout_service.cli.env.prepare import require_room
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.episodes import Episode, Score
from rollout_service.settings import Settings, load_settings
from sandboxes.errors import ImageBuildError
from sandboxes.images.store import ImageStore


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


def test_instances_that_come_again_are_found(tmp_path):
    twice = [{"question": "a"}, {"question": "b"}, {"question": "b"}, {"question": "a"}]
    named = [{"question": text, "instance_id": "1", "split": text} for text in ("train", "test")]
    said = invoke("env", "check", folder(tmp_path / "twice", twice)).stdout
    assert "warning: data set: 2 instances repeated, by `instance_id` or as a whole; number 3 is number 2 again" in said
    said = invoke("env", "check", folder(tmp_path / "shared", named)).stdout
    assert "data set: number 2 of the split 'test' is number 1, of 'train', again" in said


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


INSTANCE = {
    "problem_statement": "It is broken.",
    "FAIL_TO_PASS": ["test_it"],
    "log_parser": "parse_log_pytest",
    "eval_script": "true",
}


@pytest.fixture(autouse=True)
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    monkeypatch.setenv("ROLLOUT_IMAGES_DIR", str(folder))
    return folder


def prepare(*arguments: str | Path) -> tuple[int, dict]:
    done = CliRunner().invoke(app, ["env", "prepare", *map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def fail(*arguments: str | Path) -> Result:
    done = CliRunner().invoke(app, ["env", "prepare", *map(str, arguments)])
    assert done.exit_code == 1
    return done


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_each_image_is_looked_for_once(tmp_path, images):
    for name in ("even", "odd"):
        (images / f"{name}.sif").touch()
    names = ["odd" if number % 2 else "even" for number in range(100)]
    rows = [INSTANCE | {"instance_id": f"a-{one}", "image": name} for one, name in enumerate(names)]
    expected = {"instances": 100, "images": 2, "present": 2, "made": 0, "failures": []}
    assert prepare(write(tmp_path / "rows.jsonl", *rows), "--environment", "swe") == (0, expected)
    tasks = [{"task": {"environment": "swe", "instance": row}} for row in rows]
    assert prepare(write(tmp_path / "tasks.jsonl", *tasks)) == (0, expected)


def test_what_cannot_be_had_is_listed_with_its_instance_and_cause(tmp_path, images):
    (images / "there.sif").touch()
    rows = [
        {"environment": "swe", "instance": INSTANCE | {"instance_id": "a-1", "image": "there"}},
        {"environment": "swe", "instance": INSTANCE | {"instance_id": "a-2", "image": "nowhere"}},
        {"environment": "swe", "instance": INSTANCE | {"instance_id": "a-3", "image": "nowhere"}},
        {"environment": "swe", "instance": INSTANCE | {"instance_id": "a-4", "image": "/etc/passwd.sif"}},
        {"environment": "unknown", "instance": {}},
        {"problem_statement": "not a task"},
    ]
    code, said = prepare(write(tmp_path / "tasks.jsonl", *rows))
    assert (code, said["instances"], said["images"], said["present"], said["made"]) == (1, 6, 2, 1, 0)
    missing, path, unknown, row = said["failures"]
    assert (missing["instance"], missing["image"]) == ("a-2", "nowhere")
    assert "there is no image 'nowhere'" in missing["error"]
    assert "rollout-service image build nowhere" in missing["hint"]
    assert (path["instance"], path["image"]) == ("a-4", None)
    assert "neither the name of an image of this machine" in path["error"]
    assert "no environment 'unknown'" in unknown["error"]
    assert row["instance"] == "row 6"
    assert "--environment" in row["hint"]
    shown = fail(tmp_path / "tasks.jsonl").stderr
    assert "a-2: nowhere: there is no image" in shown
    assert shown.splitlines()[-1] == "2 images of 6 instances: 1 there already, 0 made, 4 failed"


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    assert "No such file" in fail(tmp_path / "missing.jsonl").stderr
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\nnot JSON\n')
    assert "line 2" in fail(tmp_path / "bad.jsonl").stderr


def test_a_split_is_chosen_and_must_exist(tmp_path, images):
    (images / "base.sif").touch()
    rows = [{"question": "?", "split": one} for one in ("train", "train", "test")]
    mine = folder(tmp_path / "mine", rows)
    assert prepare(mine)[1]["instances"] == 3
    said = prepare(mine, "--split", "train")[1]
    assert said == {"instances": 2, "images": 1, "present": 1, "made": 0, "failures": []}
    assert "no split 'dev'" in fail(mine, "--split", "dev").stderr


def test_no_image_is_begun_without_room(images, monkeypatch):
    store = ImageStore(images)
    require_room(store, load_settings())
    (images / "large.sif").write_bytes(b"x" * 1000)
    monkeypatch.setenv("ROLLOUT_IMAGES_BUDGET_BYTES", "1000")
    with pytest.raises(ImageBuildError, match="images_budget_bytes"):
        require_room(store, load_settings())
    monkeypatch.setenv("ROLLOUT_IMAGES_BUDGET_BYTES", "1001")
    require_room(store, load_settings())
    monkeypatch.setenv("ROLLOUT_SANDBOXES__PRESSURE__DISK_FREE_BYTES", str(10**18))
    with pytest.raises(ImageBuildError, match="GB left"):
        require_room(store, load_settings())
