"""`env new` creates an environment that is valid as it is."""

import json
import resource
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rollout_service.cli import app
from rollout_service.cli.common import CommandError
from rollout_service.cli.env.add import add_to_settings
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


EXAMPLES = Path(__file__).parents[4] / "examples" / "harbor"


@pytest.mark.parametrize(
    "text",
    [
        "",
        'host = "x"\n',
        "environments = []\n",
        'environments = ["/a"]  # mine\nport = 1\n',
        'environments = [\n  "/a",  # one ] bracket\n  "/b[1]",\n]\n[sandbox]\nprovider = "local"\n',
        '# environments = ["/no"]\n[x]\nenvironments = ["/other"]\n',
        "[x]\ny = 1\n",
    ],
)
def test_only_the_list_changes(tmp_path, text):
    file = tmp_path / "rollout.toml"
    file.write_text(text)
    before = tomllib.loads(text)
    assert add_to_settings(file, Path("/new/one"))
    after = tomllib.loads(file.read_text())
    assert after == before | {"environments": [*before.get("environments", []), "/new/one"]}
    assert not add_to_settings(file, Path("/new/one"))


@settings(max_examples=25)
@given(st.lists(st.text(max_size=12), max_size=4), st.text(min_size=1, max_size=12))
def test_any_paths_survive(tmp_path_factory, known, new):
    known = [path for path in known if path.isprintable()]
    file = tmp_path_factory.mktemp("add") / "rollout.toml"
    file.write_text(f"environments = {[*known]!r}\n" if "'" not in "".join(known) else "")
    try:
        before = tomllib.loads(file.read_text()).get("environments", [])
    except tomllib.TOMLDecodeError:
        before = None
    if before is None or not new.isprintable():
        return
    path = Path(new)
    assert add_to_settings(file, path) is (str(path) not in before)
    assert str(path) in tomllib.loads(file.read_text())["environments"]


@pytest.mark.parametrize("text", ["environments = 5\n", "x = [", 'environments = "/a"\n'])
def test_a_file_that_cannot_be_changed_safely_is_left_alone(tmp_path, text):
    file = tmp_path / "rollout.toml"
    file.write_text(text)
    with pytest.raises(CommandError):
        add_to_settings(file, Path("/new"))
    assert file.read_text() == text


@pytest.fixture
def full_disk() -> Iterator[None]:
    """Let no file grow beyond a few bytes, as on a disk without room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_settings_without_room_for_one_more_environment_stay_as_they_were(tmp_path, request):
    file, link = tmp_path / "mine.toml", tmp_path / "rollout.toml"
    file.write_text('keys = ["a-key-of-enough-characters"]\n')
    file.chmod(0o600)
    link.symlink_to(file)
    assert add_to_settings(link, Path("/first"))
    before = file.read_text()
    request.getfixturevalue("full_disk")
    with pytest.raises(CommandError, match="cannot be written"):
        add_to_settings(link, Path("/second"))
    assert (file.read_text(), sorted(tmp_path.iterdir())) == (before, [file, link])
    assert (link.is_symlink(), file.stat().st_mode & 0o777) == (True, 0o600), "others may not read the keys"


def test_a_new_environment_without_room_leaves_nothing_behind(tmp_path, full_disk):
    with pytest.raises(CommandError, match="cannot create"):
        make_environment("mine", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_checks_the_environment_first(tmp_path):
    file = tmp_path / "mine.toml"
    done = CliRunner().invoke(app, ["env", "add", str(EXAMPLES), "--config", str(file)])
    assert (done.exit_code, tomllib.loads(file.read_text())) == (0, {"environments": [str(EXAMPLES)]})
    wrong = CliRunner().invoke(app, ["env", "add", str(tmp_path), "--config", str(file)])
    assert wrong.exit_code == 1
    assert "there is no environment at" in wrong.stderr
