"""Removing a hostile tree stays inside it, copes with any depth and modes, takes bounded time, and never raises."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.reclaim.rmtree import mounts_below, remove_tree

pytestmark = pytest.mark.slow


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Return a folder of files that a tree may link to and must not lose."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("kept")
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    folder.mkdir()
    return folder


def test_links_are_not_followed(tree, outside):
    (tree / "folder").symlink_to(outside)
    (tree / "file").symlink_to(outside / "file")
    (tree / "loop").symlink_to("loop")
    (tree / "up").symlink_to("..")
    assert remove_tree(tree) is None
    assert not tree.exists()
    assert (outside / "file").read_text() == "kept"


def test_a_link_in_place_of_the_tree_is_removed_alone(tree, outside):
    tree.rmdir()
    tree.symlink_to(outside)
    assert remove_tree(tree) is None
    assert not tree.is_symlink()
    assert (outside / "file").exists()


def test_ten_thousand_levels(tree):
    handle = os.open(tree, os.O_RDONLY)
    for _ in range(10_000):
        os.mkdir("d" * 50, dir_fd=handle)
        below = os.open("d" * 50, os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = below
    os.close(handle)
    assert remove_tree(tree) is None
    assert not tree.exists()


def test_folders_without_rights(tree):
    (tree / "a/b/c").mkdir(parents=True)
    (tree / "a/b/c/file").touch()
    for name in ("a/b/c", "a/b", "a"):
        (tree / name).chmod(0)
    tree.chmod(0)
    assert remove_tree(tree) is None
    assert not tree.exists()


def test_special_files_and_odd_names(tree):
    os.mkfifo(tree / "pipe")
    (tree / "line\nbreak").mkdir()
    (tree / "line\nbreak" / "-rf").touch()
    (tree / os.fsdecode(b"\xff\xfe")).mkdir()
    (tree / " ").touch()
    assert remove_tree(tree) is None
    assert not tree.exists()


def test_many_files(tree):
    for number in range(20_000):
        (tree / f"{number}").touch()
    assert remove_tree(tree) is None
    assert not tree.exists()


def test_the_time_is_bounded_and_leftovers_are_reported(tree):
    (tree / "a/b").mkdir(parents=True)
    problem = remove_tree(tree, time.monotonic() - 1)
    assert problem is not None
    assert "too long" in problem
    assert remove_tree(tree) is None


def test_a_missing_tree_counts_as_removed(tmp_path):
    assert remove_tree(tmp_path / "nothing") is None
    assert remove_tree(tmp_path / "nothing" / "below") is None


MOUNTED = """
import subprocess, sys
from pathlib import Path
from sandboxes.reclaim.rmtree import mounts_below, remove_tree
tree, outside = Path(sys.argv[1]), Path(sys.argv[2])
point = tree / "deep point" / "here"
point.mkdir(parents=True)
subprocess.run(["mount", "--bind", str(outside), str(point)], check=True)
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(tree / "deep point")], check=True)
assert len(mounts_below(tree)) == 2, mounts_below(tree)
assert remove_tree(tree) is None
assert not tree.exists()
"""


def test_mounts_are_unmounted_and_not_entered(tree, outside):
    """Run the removal in separate namespaces, as the user who runs the tests."""
    namespaces = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private", "--"]
    script = [sys.executable, "-c", MOUNTED, str(tree), str(outside)]
    subprocess.run([*namespaces, *script], check=True, cwd=Path(__file__).parents[4])
    assert (outside / "file").read_text() == "kept"
    assert mounts_below(tree) == []


LOCKED = """
import sys
from pathlib import Path
from sandboxes.reclaim.rmtree import remove_tree
tree = Path(sys.argv[1])
assert "cannot be unmounted" in remove_tree(tree)
assert (tree / "here" / "file").exists()
"""


def test_a_mount_that_stays_keeps_the_tree(tree, outside):
    """A mount of a namespace with more rights cannot be unmounted, and the files below it are not ours."""
    (tree / "here").mkdir()
    namespaces = "unshare --user --map-root-user --mount --propagation private --"
    shell = f'mount --bind "$1" "$2/here" && exec {namespaces} "$3" -c "$4" "$2"'
    arguments = ["bash", str(outside), str(tree), sys.executable, LOCKED]
    command = [*namespaces.split(), "bash", "-c", shell, *arguments]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[4])
    assert (outside / "file").read_text() == "kept"


NODES = st.recursive(
    st.sampled_from(["file", "link", "pipe"]),
    lambda below: st.dictionaries(st.text("ab. \n", min_size=1, max_size=3), below, max_size=4),
    max_leaves=20,
)


def build(path: Path, node: "str | dict[str, object]", outside: Path) -> None:
    if node == "file":
        path.touch()
    elif node == "link":
        path.symlink_to(outside)
    elif node == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
        for name, below in node.items():
            if name not in (".", ".."):
                build(path / name, below, outside)
        path.chmod(0o500 if len(node) % 2 else 0)


@given(NODES)
def test_any_tree_is_removed_and_nothing_else(node):
    with tempfile.TemporaryDirectory() as place:
        outside = Path(place) / "outside"
        outside.mkdir()
        (outside / "file").touch()
        build(Path(place) / "tree", node, outside)
        assert remove_tree(Path(place) / "tree") is None
        assert list(Path(place).iterdir()) == [outside]
        assert (outside / "file").exists()
