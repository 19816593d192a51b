"""`env new` creates an environment that is valid as it is."""

import json
import subprocess
import sys

import pytest

from rollout_service.cli.common import CommandError
from rollout_service.cli.env.new import make_environment
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.environments.registry import load_path


def test_the_new_environment_loads_and_its_instances_pass(tmp_path):
    environment = load_folder(make_environment("word-count", tmp_path))
    assert environment.spec.name == "word-count"
    assert len(environment.dataset()) == 3
    for instance in environment.dataset():
        environment.check(instance)


@pytest.mark.parametrize("name", ["", "a/b", "../x", "-x", "x" * 65])
def test_an_invalid_name_is_refused_and_nothing_is_created(tmp_path, name):
    with pytest.raises(CommandError, match="not a valid name"):
        make_environment(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_not_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(CommandError, match="already exists"):
        make_environment("mine", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "reward", "answered"), [("3\n", 1.0, 1.0), ("4", 0.0, 1.0), ("", 0.0, 0.0), (None, 0.0, 0.0)]
)
def test_the_templates_own_scripts_prepare_and_grade(tmp_path, answer, reward, answered):
    folder = make_environment("word-count", tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    instance, result = tmp_path / "instance.json", tmp_path / "result.json"
    instance.write_text(json.dumps({"text": "one two\nthree"}))
    environ = {"ROLLOUT_INSTANCE": instance, "ROLLOUT_WORKDIR": work, "ROLLOUT_RESULT": result}
    environ = {name: str(path) for name, path in environ.items()}
    subprocess.run([sys.executable, folder / "prepare.py"], cwd=work, env=environ, check=True)
    assert (work / "text.txt").read_text() == "one two\nthree"
    if answer is not None:
        (work / "answer.txt").write_text(answer)
    subprocess.run([sys.executable, folder / "grade.py"], cwd=tmp_path, env=environ, check=True)
    assert json.loads(result.read_text()) == {"reward": reward, "parts": {"answered": answered}}


@pytest.mark.parametrize("template", ["files", "terminal", "stem", "mcp", "swe", "game"])
def test_every_template_is_an_environment_without_findings(tmp_path, template):
    environment = load_path(make_environment("mine", tmp_path, template))
    assert environment.spec.name == "mine"
    assert environment.has_solution
    assert environment.findings() == []
    for instance in environment.dataset():
        environment.check(instance)


def test_an_unknown_template_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(CommandError, match="no template 'terminl'; did you mean terminal") as caught:
        make_environment("mine", tmp_path, "terminl")
    assert caught.value.hint == "The templates are files, game, mcp, stem, swe, terminal."
    assert list(tmp_path.iterdir()) == []
