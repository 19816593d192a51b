"""Patches are taken apart without losing a byte, and what could falsify a report is left out."""

import os
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.environments.swe.patches import changed_paths, separate_forbidden, split_patch

ENVIRONMENT = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}


def change(path, *, new=False):
    head = f"diff --git a/{path} b/{path}\n" + (
        "new file mode 100644\n--- /dev/null\n" if new else f"--- a/{path}\n"
    )
    return f"{head}+++ b/{path}\n@@ -0,0 +1 @@\n+x\n".encode()


def git(folder, *words):
    done = subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, env=ENVIRONMENT)
    return done.stdout


@given(st.lists(st.sampled_from([b"a.py", b"b/c.py", b"d e.txt"])), st.binary(max_size=50))
def test_the_parts_of_a_patch_are_the_patch(paths, tail):
    patch = b"".join(change(path.decode()) for path in paths)
    if paths:
        patch += b"+" + tail.replace(b"\n", b" ") + b"\n"
    assert b"".join(part.data for part in split_patch(patch)) == patch
    assert changed_paths(patch) == {path.decode() for path in paths}


def test_text_without_a_header_has_no_parts():
    assert split_patch(b"nonsense\n") == []
    assert split_patch(b"") == []


def test_paths_that_git_itself_writes(tmp_path):
    git(tmp_path, "init", "--quiet")
    names = ["plain.py", "with space.py", "ümlaut.py", 'quote".py', "tab\there.py", "a b/b c.py", "x b/x b"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\0binary" if name == "plain.py" else b"text\n")
    git(tmp_path, "add", "--all")
    patch = git(tmp_path, "diff", "--cached", "--binary", "4b825dc642cb6eb9a060e54bf8d69288fbee4904")
    assert changed_paths(patch) == set(names)
    assert all(part.adds and not part.deletes for part in split_patch(patch))


def test_a_renamed_file_has_both_its_paths(tmp_path):
    git(tmp_path, "init", "--quiet")
    (tmp_path / "old name.py").write_text("line\n" * 20)
    git(tmp_path, "add", "--all")
    git(tmp_path, "-c", "user.name=n", "-c", "user.email=e", "commit", "--quiet", "--message", "m")
    (tmp_path / "old name.py").rename(tmp_path / "conftest.py")
    git(tmp_path, "add", "--all")
    patch = git(tmp_path, "diff", "--cached", "--find-renames", "HEAD")
    assert changed_paths(patch) == {"old name.py", "conftest.py"}
    assert separate_forbidden(patch, (), b"") == (b"", ["conftest.py"])


@pytest.mark.parametrize(
    "path",
    [
        *("conftest.py", "deep/er/conftest.py", "pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml"),
        *("sitecustomize.py", "src/usercustomize.py", "hook.pth", "package.egg-info/entry_points.txt"),
        *("p.dist-info/entry_points.txt", "tests/test_it.py", ".gitattributes", "sub/.git/config"),
    ],
)
def test_what_could_falsify_a_report_is_left_out(path):
    good = change("package/module.py")
    assert separate_forbidden(change(path) + good, {"tests/test_it.py"}, b"") == (good, [path])


@pytest.mark.parametrize(
    "path", ["pytest.py", "pytest/__init__.py", "_pytest/x.py", "src/pluggy.py", "unittest.py"]
)
def test_a_new_module_in_the_place_of_a_test_runner_is_left_out(path):
    assert separate_forbidden(change(path, new=True), (), b"") == (b"", [path])
    assert separate_forbidden(change(path), (), b"") == (
        change(path),
        [],
    )  # the repository is that runner's own


def test_what_the_reference_repair_changes_may_be_changed_but_for_tests():
    gold = change("setup.cfg") + change("tests/test_it.py")
    patch = change("setup.cfg") + change("tests/test_it.py") + change("conftest.py")
    kept, left_out = separate_forbidden(patch, {"tests/test_it.py"}, gold)
    assert (kept, left_out) == (change("setup.cfg"), ["tests/test_it.py", "conftest.py"])


@pytest.mark.parametrize("path", ["pytest_plugin/x.py", "src/package/pytest.py", "docs/conf.py", "python.py"])
def test_ordinary_files_are_kept(path):
    assert separate_forbidden(change(path, new=True), (), b"")[1] == []
