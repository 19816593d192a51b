"""The registry loads every environment that works, and reports missing and broken ones."""

import sys
from importlib.metadata import EntryPoint

import pytest

from api_schemas.rollouts import StopReason
from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.cli.env.check import load_environment
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.environments.dataset_files import count_splits, select_split
from rollout_service.environments.registry import GROUP, EnvironmentRegistry, load_path
from rollout_service.episodes import Score


class Plain(Environment):
    def __init__(self, name="plain"):
        self.spec = EnvironmentSpec(name=name)

    async def run(self, episode):
        return StopReason.FINISHED

    async def evaluate(self, episode):
        return Score(1.0)


instance = Plain("an-instance")
not_an_environment = 3


def factory():
    return Plain("from-a-factory")


def broken():
    raise RuntimeError("it does not work here")


def plugin(name, attribute, monkeypatch):
    """Return an entry point to an attribute of this module, under the name that pytest imported it by."""
    entry = EntryPoint(name=name, value=f"{__name__}:{attribute}", group=GROUP)
    monkeypatch.setitem(__import__("sys").modules, __name__, __import__("sys").modules[__name__])
    return entry


def folder(path, name):
    path.mkdir()
    (path / "environment.toml").write_text(f'name = "{name}"\nimage = "base"\n[evaluate]\ncommand = "true"\n')
    return path


def test_the_built_in_environments_are_plug_ins_like_others():
    registry = EnvironmentRegistry.load()
    assert registry.problems == {}
    assert {environment.spec.name for environment in registry.list()} >= {"calc", "code", "math"}
    with_instances = [registry.get(name) for name in ("calc", "code", "math")]
    for environment in with_instances:
        for task in environment.dataset():
            environment.check(task)
        assert set(count_splits(environment.dataset())) == {"train", "held_out"}
        sides = (select_split(environment.dataset(), split, field="split") for split in ("train", "held_out"))
        train, held_out = ({task["question"] for task in side} for side in sides)
        assert not train & held_out


def test_an_unknown_kind_is_answered_with_the_nearest(tmp_path):
    (tmp_path / "environment.toml").write_text('kind = "sve"\n')
    with pytest.raises(ConfigurationError, match="there is no kind 'sve'; did you mean swe") as caught:
        load_path(tmp_path)
    assert "swe" in caught.value.hint


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(InvalidFieldError) as caught:
        EnvironmentRegistry([Plain("calc"), Plain("math")]).get("clac")
    [field] = caught.value.fields
    assert field.path == "environment"
    assert "did you mean calc" in field.message
    assert caught.value.context == {"environments": ["calc", "math"]}


def test_a_broken_entry_does_not_hide_the_others(tmp_path, monkeypatch):
    plugins = [
        plugin("good", "instance", monkeypatch),
        plugin("made", "factory", monkeypatch),
        plugin("raises", "broken", monkeypatch),
        plugin("wrong", "not_an_environment", monkeypatch),
        plugin("gone", "nothing_there", monkeypatch),
        EntryPoint(name="absent", value="no.such.module:environment", group=GROUP),
    ]
    paths = [folder(tmp_path / "a", "a"), folder(tmp_path / "b", "a"), tmp_path / "none"]
    registry = EnvironmentRegistry.load(paths, plugins=plugins)
    assert [environment.spec.name for environment in registry.list()] == [
        "a",
        "an-instance",
        "from-a-factory",
    ]
    assert set(registry.problems) == {"raises", "wrong", "gone", "absent", *map(str, paths[1:])}
    assert "RuntimeError: it does not work here" in str(registry.problems["raises"])
    assert "is not an Environment but an object of type int" in str(registry.problems["wrong"])
    assert "environment 'a' is already registered" in str(registry.problems[str(paths[1])])
    with pytest.raises(ConfigurationError, match="plug-in 'absent'"):
        registry.get("absent")


def test_a_folder_may_be_named_by_its_file(tmp_path):
    path = folder(tmp_path / "a", "a")
    assert load_path(path / "environment.toml").spec.name == "a"
    with pytest.raises(ConfigurationError, match="there is no environment at"):
        load_path(tmp_path)


PYTHON = """
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.episodes import Score

class Mine(Environment):
    spec = EnvironmentSpec(name="mine")
    async def run(self, episode): ...
    async def evaluate(self, episode): return Score(1.0)
"""
MADE = 'environment = Another(EnvironmentSpec(name="made"))\n'


def test_a_python_file_is_an_environment(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(PYTHON)
    assert load_path(file).spec.name == "mine"
    file.write_text(f"{PYTHON}\nclass Another(Mine):\n    def __init__(self, spec): self.spec = spec\n{MADE}")
    assert load_path(file).spec.name == "made"


@pytest.mark.parametrize("name", ["words_of_mine:Mine", "words_of_mine:made", "words_of_mine.py:Mine"])
def test_an_object_of_a_module_is_an_environment(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "words_of_mine.py").write_text(f"{PYTHON}\nmade = Mine()\nclass Another(Mine): ...\n")
    try:
        assert load_path(tmp_path / name).spec.name == "mine"
        monkeypatch.chdir(tmp_path)
        assert load_environment(name).spec.name == "mine"
    finally:
        sys.modules.pop("words_of_mine", None)


@pytest.mark.parametrize(
    ("name", "reason", "hint"),
    [
        ("no_such_module:Mine", "No module named 'no_such_module'", "install no_such_module"),
        ("json:Mine", "has no attribute 'Mine'", "Correct the name after the colon"),
        ("json:dumps", "TypeError", "Give its parameters defaults"),
        ("json:__name__", "not an Environment but an object of type str", "Name a subclass"),
    ],
)
def test_an_object_that_is_not_an_environment_says_why(tmp_path, monkeypatch, name, reason, hint):
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ConfigurationError, match=reason) as refused:
        load_path(tmp_path / name)
    assert name in str(refused.value)
    assert hint in refused.value.hint


def test_an_error_in_a_python_file_names_the_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import json\n\njson.loads('{')\n")
    with pytest.raises(ConfigurationError, match=r"JSONDecodeError: .* \(.*mine\.py, line 3\)"):
        load_path(file)


@pytest.mark.parametrize(
    ("text", "reason"), [("", "defines 0 environments"), ("oops", "NameError: name 'oops' is not defined")]
)
def test_a_python_file_without_an_environment_says_why(tmp_path, text, reason):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=rf"mine\.py.*{reason}"):
        load_path(file)
