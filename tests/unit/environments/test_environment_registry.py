"""The registry loads every environment that works, and reports missing and broken ones."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from zipfile import ZipFile

import pytest

from api_schemas.rollouts import StopReason
from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.cli.common import CommandError
from rollout_service.cli.env.check import load_environment
from rollout_service.cli.env.install import GROUP as LIBRARIES
from rollout_service.cli.env.install import find_library, install_library
from rollout_service.environments.bridges.verifiers.environment import load_verifiers
from rollout_service.environments.contract import Environment, EnvironmentSpec
from rollout_service.environments.dataset_files import count_splits, select_split
from rollout_service.environments.libraries import AddedPackages, Library, find_interpreter
from rollout_service.environments.registry import GROUP, EnvironmentRegistry, load_path
from rollout_service.episodes import Score
from tests.support.scripts import write_script


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
    assert {environment.spec.name for environment in registry.list()} >= {"calc", "code", "math", "stem"}
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


def test_a_folder_that_fails_in_any_way_does_not_hide_the_others(tmp_path):
    texts = {
        "image": f'image = "{"x" * 5_000}"\n',
        "dataset": 'image = "base"\ndataset.path = "a\\u0000b"\n',
        "prompt": f'image = "base"\nprompt = "{"{% if 1 %}" * 2_000}"\n',
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "environment.toml").write_text(f'name = "e"\n{text}[evaluate]\ncommand = "true"\n')
    paths = [*(tmp_path / name for name in texts), tmp_path / ("x" * 5_000), folder(tmp_path / "fine", "fine")]
    registry = EnvironmentRegistry.load(paths, plugins=[])
    assert [one.spec.name for one in registry.list()] == ["fine"]
    assert len(registry.problems) == 4
    assert all(len(str(problem)) < 800 for problem in registry.problems.values())


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


def test_a_name_of_nothing_is_also_not_a_folder_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no folder ./zyx .* here, and there is no environment 'zyx'$"):
        load_environment("zyx")


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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", r"mine\.py.*defines 0 environments"),
        ("oops", r"mine\.py.*NameError: name 'oops' is not defined"),
        ("import json\n\njson.loads('{')\n", r"JSONDecodeError: .* \(.*mine\.py, line 3\)"),
    ],
)
def test_a_python_file_without_an_environment_says_why(tmp_path, text, reason):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=reason):
        load_path(file)


ROOT = Path(__file__).parents[3]
UV = ROOT / ".cache" / "bootstrap" / "bin"


@pytest.fixture
def library(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{UV}:{os.environ['PATH']}")  # ten times as fast as pip
    lock = tmp_path / "requirements.lock"
    lock.write_text("# nothing\n")
    return Library("small", lock)


def test_a_missing_library_names_the_command_that_installs_it(library):
    with pytest.raises(ConfigurationError) as caught:
        library.python()
    assert caught.value.hint == "Install them: rollout-service env install small"


def test_it_is_installed_once_and_runs_apart_from_the_service(library):
    folder = library.install()
    (folder / "mark").touch()
    assert library.install() == folder
    assert (folder / "mark").exists()
    command = [str(library.python()), "-I", "-c", "import sys; print(sys.prefix); import pydantic"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(folder)
    assert "No module named 'pydantic'" in done.stderr


def test_another_lock_has_another_folder(library):
    before = library.folder
    library.requirements.write_text("# another\n")
    assert library.folder != before


def test_an_installation_that_fails_leaves_nothing(library):
    library.requirements.write_text("no-hash==1.0\n")
    with pytest.raises(ConfigurationError, match="failed"):
        library.install()
    assert not library.is_installed
    assert list(library.folder.parent.iterdir()) == []


NEWER = (sys.version_info[0], sys.version_info[1] + 1)
NAME = f"python{NEWER[0]}.{NEWER[1]}"


def pretend(path: Path, prints: str) -> Path:
    """Make a program that stands for a Python: it prints whether it is new enough."""
    return write_script(path, f"echo {prints}\n")


@pytest.fixture
def no_python(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}/broken:{tmp_path}/found:/usr/sbin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return tmp_path


def test_the_services_own_python_is_used_where_it_is_new_enough(no_python):
    assert find_interpreter("small", (3, 11)) == sys.executable


@pytest.mark.parametrize("where", [f"found/{NAME}", f"pyenv/versions/{NEWER[0]}.{NEWER[1]}.1/bin/{NAME}"])
def test_a_newer_python_is_found_past_one_that_does_not_start(no_python, where):
    pretend(no_python / "broken" / NAME, "; exit 127")
    found = pretend(no_python / where, "True")
    assert find_interpreter("small", NEWER) == str(found)


def test_without_a_newer_python_the_error_says_how_to_get_one(no_python):
    with pytest.raises(ConfigurationError, match=f"'small' needs Python {NEWER[0]}.{NEWER[1]} or newer") as caught:
        find_interpreter("small", NEWER)
    assert f"uv python install {NEWER[0]}.{NEWER[1]}" in caught.value.hint


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(CommandError, match="did you mean swe"):
        install_library("swee")


def test_every_lock_of_an_environment_is_a_library_of_its_name():
    declared = {plugin.name: find_library(plugin.name) for plugin in entry_points(group=LIBRARIES)}
    assert all(library.name == name for name, library in declared.items())
    locks = set((ROOT / "rollout_service").rglob("requirements.lock"))
    assert {library.requirements for library in declared.values()} == locks


@pytest.mark.parametrize(("value", "problem"), [("nowhere:x", "ModuleNotFoundError"), ("json:loads", "not a Library")])
def test_a_plug_in_that_is_no_library_is_named(value, problem):
    plugin = EntryPoint("mine", value, LIBRARIES)
    with pytest.raises(ConfigurationError, match=rf"the plug-in 'mine' \({value}\) .*{problem}"):
        find_library("mine", plugins=[plugin])


def test_another_program_that_prepares_it_has_another_folder(library, tmp_path):
    program = tmp_path / "prepare.py"
    program.write_text("1")
    prepared = replace(library, prepared_by=(program,))
    before = prepared.folder
    program.write_text("2")
    assert prepared.folder not in (before, library.folder)


def write_wheel(folder: Path) -> str:
    """Write the wheel of a package `small_part`, whose version is 1.0, and return its name."""
    name, info = "small_part-1.0-py3-none-any.whl", "small_part-1.0.dist-info"
    with ZipFile(folder / name, "w") as wheel:
        wheel.writestr("small_part.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: small-part\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "small_part.py,,\n")
    return name


@pytest.mark.slow(seconds=20)
def test_what_an_environment_needs_besides_is_installed_next_to_the_library(library, tmp_path):
    library.install()
    added = AddedPackages(library, (f"./{write_wheel(tmp_path)}",), tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        added.require()
    assert caught.value.hint == f"Install them: rollout-service env install {tmp_path}"
    assert (added.install() / "small_part.py").exists()
    assert added.require() == added.install()
    locked = replace(library, requirements=tmp_path / "other.lock")
    locked.requirements.write_text("small-part==2.0 \\\n    --hash=sha256:00\n")
    library.folder.rename(locked.folder)
    with pytest.raises(ConfigurationError, match=r"small-part"):  # the library keeps its own version
        replace(added, library=locked).install()


def test_a_folder_of_tasksets_has_the_command_for_its_requirements(library, tmp_path):
    (library.folder / "bin").mkdir(parents=True)
    (library.folder / "bin" / "python").touch()
    declared = 'kind = "verifiers"\nrequirements = ["small-part"]\n[[taskset]]\nid = "words"\n'
    (tmp_path / "environment.toml").write_text(declared)
    with pytest.raises(ConfigurationError, match="its `requirements` are not installed on this machine"):
        load_verifiers(tmp_path, library)
    (tmp_path / "environment.toml").write_text(declared.replace("small-part", "--index-url=x"))
    with pytest.raises(ConfigurationError, match="'--index-url=x' is not a requirement"):
        load_verifiers(tmp_path, library)
