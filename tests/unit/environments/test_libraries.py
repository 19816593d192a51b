"""Packages with an environment of their own are complete or not there, and what is missing is said with its command."""

import os
import subprocess
from pathlib import Path

import pytest

from rollout_service.cli.common import CommandError
from rollout_service.cli.env.install import install_library
from rollout_service.environments.libraries import Library
from rollout_service.errors import ConfigurationError

UV = Path(__file__).parents[3] / ".cache" / "bootstrap" / "bin"


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


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(CommandError, match="did you mean swe"):
        install_library("swee")
