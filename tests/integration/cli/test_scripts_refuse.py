"""The scripts say what they need before they begin."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.plugins import parts as parts_module
from tests.support.plugins.parts import PARTS
from tests.support.scripts import write_script

SCRIPTS = Path(__file__).parents[3] / "scripts"
SHELL = sorted(  # those in Python install nothing, and run on any system
    path.name
    for path in SCRIPTS.iterdir()
    if path.is_file() and os.access(path, os.X_OK) and path.read_bytes().startswith(b"#!/usr/bin/env bash")
)


@pytest.mark.parametrize("script", SHELL)
def test_an_operating_system_other_than_linux_is_named(tmp_path, script):
    write_script(tmp_path / "uname", "echo Darwin\n")
    done = subprocess.run(
        [SCRIPTS / script],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "needs Linux, and this is Darwin" in done.stderr
    assert len(done.stderr.splitlines()) == 1


PLUGIN = """
[project]
name = "my-plugin"
version = "0.1"
dependencies = ["httpx{version}"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
"""


@pytest.mark.parametrize(("version", "fits"), [("", True), ("==0.27.0", False)])
def test_a_plug_in_is_installed_next_to_the_locked_packages(tmp_path, version, fits):
    (tmp_path / "my_plugin").mkdir()
    (tmp_path / "my_plugin" / "__init__.py").touch()
    (tmp_path / "pyproject.toml").write_text(PLUGIN.format(version=version))
    done = subprocess.run(
        [SCRIPTS / "install-plugin", tmp_path, "--dry-run"], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) is fits, done.stderr
    assert "my-plugin" in done.stderr


ALWAYS = ["trainer", "systemd"]
FIRST, SECOND = ([part.name for part in PARTS if part.tier == tier] for tier in (1, 2))
FIRST.insert(1, "base_image")


def copy_scripts(folder: Path) -> None:
    """Copy the scripts, and the list of parts, which they read."""
    shutil.copytree(SCRIPTS, folder / "scripts")
    (folder / "tests" / "support" / "plugins").mkdir(parents=True)
    shutil.copy(parts_module.__file__, folder / "tests" / "support" / "plugins")


@pytest.mark.parametrize(
    ("arguments", "marked", "parts"),
    [
        (["tests/unit"], [], ALWAYS),
        (["tests/some"], ["apptainer"], [*ALWAYS, "apptainer", "base_image"]),
        (["tests/some"], ["sglang", "trainers"], [*ALWAYS, "sglang", "trainers"]),
        ([], [], [*ALWAYS, *FIRST]),
        (["--all"], [], [*ALWAYS, *FIRST, *SECOND]),
        (["--fast"], ["apptainer"], []),
        (["--fast", "tests/some"], ["apptainer"], []),
    ],
)
def test_only_what_the_chosen_tests_need_is_installed(tmp_path, arguments, marked, parts):
    """Copy the scripts next to a fake pytest that finds tests with these markers; they ask it at most once."""
    copy_scripts(tmp_path)
    pytest_program = tmp_path / ".venv" / "bin" / "pytest"
    pytest_program.parent.mkdir(parents=True)
    log = tmp_path / "asked"
    status = 0 if marked else 5
    pytest_program.write_text(f'#!/bin/sh\necho "$*" >>{log}\necho "real parts: {" ".join(marked)}"\nexit {status}\n')
    pytest_program.chmod(0o755)
    done = subprocess.run(
        [tmp_path / "scripts" / "test", "--dry-run", *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == parts
    asked = log.read_text().splitlines() if log.exists() else []
    assert len(asked) == ("tests/" in "".join(arguments) and "--fast" not in arguments)
    assert all(line.startswith("--collect-only") for line in asked)


def test_everything_is_installed_where_the_tests_cannot_be_collected(tmp_path):
    copy_scripts(tmp_path)
    done = subprocess.run(
        [tmp_path / "scripts" / "test", "--dry-run", "tests/some"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [*ALWAYS, *FIRST, *SECOND]
