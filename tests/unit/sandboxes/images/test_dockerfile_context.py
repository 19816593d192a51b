"""The files that a build copies: patterns, .dockerignore, digests, and links that lead nowhere."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from sandboxes.errors import ImageNotFoundError
from sandboxes.images.dockerfile.context import BuildContext, IgnoreRules, digest, send


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    for name in ("a.py", "b.py", "notes.md", "src/a.py", "src/deep/c.py", "src/deep/c.log", "node/x/y"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (folder / "inner").symlink_to("src/deep")
    (folder / "outer").symlink_to("/etc")
    (folder / "away").symlink_to("../../../../etc/passwd")
    return folder


def names(root: Path, *sources: str, unpack: bool = False) -> list[str]:
    return [file.name for file in BuildContext(root).select(sources, unpack=unpack)]


def test_files_folders_and_patterns(root):
    assert names(root, "a.py") == names(root, "/a.py") == names(root, "./../a.py") == ["f/a.py"]
    assert names(root, "*.py", "src/d*") == ["f/a.py", "f/b.py", "d", "d/c.log", "d/c.py"]
    assert names(root, "[!a].py") == names(root, "[^a].py") == ["f/b.py"]
    assert names(root, "s?c/deep/*.py") == ["f/c.py"]
    assert names(root, "inner") == ["d", "d/c.log", "d/c.py"], "a link that is named is followed"
    assert "d/inner" in names(root, "."), "one in a folder stays a link"


@pytest.mark.parametrize("source", ["none", "*.txt", "outer", "outer/passwd", "away", "src/a.py/x"])
def test_nothing_outside_is_found(root, source):
    with pytest.raises(ImageNotFoundError, match="is not in the context"):
        names(root, source)


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ("src\n", ["a.py", "b.py", "notes.md", "node/x/y"]),
        ("*.py", ["notes.md", "src/a.py", "src/deep/c.py", "src/deep/c.log", "node/x/y"]),
        ("**/*.py\n# notes.md\n\n", ["notes.md", "src/deep/c.log", "node/x/y"]),
        ("*\n!src/deep\nsrc/deep/*.log", ["src/deep/c.py"]),
        ("/src/deep/\n./node/../b.py", ["a.py", "notes.md", "src/a.py", "node/x/y"]),
        ("**/deep/**", ["a.py", "b.py", "notes.md", "src/a.py", "node/x/y"]),
        ("?.py\n[st]rc", ["notes.md", "node/x/y"]),
        ("a\\.py", ["b.py", "notes.md", "src/a.py", "src/deep/c.py", "src/deep/c.log", "node/x/y"]),
        ("**", []),
        (
            "\ufeffnode\n!node/x",
            ["a.py", "b.py", "notes.md", "src/a.py", "src/deep/c.py", "src/deep/c.log", "node/x/y"],
        ),
    ],
)
def test_the_last_rule_that_matches_decides(root, rules, left):
    (root / ".dockerignore").write_text(rules)
    files = [one for one in BuildContext(root).select(["."]) if one.path and one.path.is_file()]
    found = {one.name.removeprefix("d/") for one in files if one.path and not one.path.is_symlink()}
    assert found - {".dockerignore"} == set(left)


def test_rules_beside_a_dockerfile_come_first(root):
    (root / ".dockerignore").write_text("a.py")
    (root / "Dockerfile.dockerignore").write_text("b.py")
    context = BuildContext(root, root / "Dockerfile")
    assert [file.name for file in context.select(["a.py"])] == ["f/a.py"]
    with pytest.raises(ImageNotFoundError, match="dockerignore leaves it out"):
        context.select(["b.py"])


def test_an_empty_rule_file_ignores_nothing():
    assert not IgnoreRules("").ignores("a")
    assert not IgnoreRules("!a").ignores("a")


def test_a_digest_counts_content_and_modes_but_no_times(root):
    def found() -> str:
        return digest(BuildContext(root).select(["."]))

    first = found()
    os.utime(root / "a.py", (1, 1))
    assert found() == first
    (root / "a.py").chmod(0o700)
    second = found()
    (root / "inner").unlink()
    (root / "inner").symlink_to("src")
    third = found()
    (root / "src/deep/c.py").rename(root / "src/deep/d.py")
    assert len({first, second, third, found()}) == 4


def test_what_is_sent_belongs_to_root_and_archives_are_unpacked(root):
    with tarfile.open(root / "packed.tar.xz", "w:xz") as tar:
        tar.add(root / "src", "../up")
    pipe = io.BytesIO()
    send(BuildContext(root).select(["a.py", "packed.tar.xz"], unpack=True), pipe)
    pipe.seek(0)
    with tarfile.open(fileobj=pipe) as archive:
        members = archive.getmembers()
    assert [member.name for member in members[:3]] == ["f/a.py", "d/up", "d/up/a.py"]
    assert (members[0].uid, members[0].uname) == (0, "")
    assert names(root, "packed.tar.xz") == ["f/packed.tar.xz"], "COPY copies it as it is"
