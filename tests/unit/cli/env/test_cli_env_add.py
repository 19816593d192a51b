"""`env add` changes one key of a settings file, and nothing else in it."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rollout_service.cli import app
from rollout_service.cli.common import CommandError
from rollout_service.cli.env.add import add_to_settings

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


def test_the_command_checks_the_environment_first(tmp_path):
    file = tmp_path / "mine.toml"
    done = CliRunner().invoke(app, ["env", "add", str(EXAMPLES), "--config", str(file)])
    assert (done.exit_code, tomllib.loads(file.read_text())) == (0, {"environments": [str(EXAMPLES)]})
    wrong = CliRunner().invoke(app, ["env", "add", str(tmp_path), "--config", str(file)])
    assert wrong.exit_code == 1
    assert "there is no environment at" in wrong.stderr
