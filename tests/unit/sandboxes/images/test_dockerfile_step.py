"""The step of a build needs nothing but Python's own library, which is all that it has."""

import ast
import os
import shutil
import subprocess
import sys

import pytest

from sandboxes.images.dockerfile.namespace import SCRIPT


@pytest.mark.parametrize("path", sorted(SCRIPT.glob("*.py")), ids=lambda path: path.stem)
def test_a_module_imports_the_library_and_its_neighbors(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {name.name.split(".")[0] for name in node.names} <= sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] in sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1
            assert (SCRIPT / f"{node.module}.py").is_file()


def test_the_folder_runs_anywhere_without_hiding_the_library(tmp_path):
    """A job that names no ids ends with that error, after every module has been imported."""
    copied = shutil.copytree(SCRIPT, tmp_path / "step")
    for name in ("json.py", "tarfile.py", "step/json.py", "step/tarfile.py"):
        (tmp_path / name).write_text("raise SystemExit('hidden')")
    job = os.memfd_create("job")
    try:
        os.write(job, b"{}")
        os.lseek(job, 0, os.SEEK_SET)
        done = subprocess.run(
            [sys.executable, "-I", "-S", copied, str(job), "2"],
            pass_fds=[job],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        os.close(job)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'ids'"
