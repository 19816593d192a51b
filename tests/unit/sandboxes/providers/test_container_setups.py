"""The report of a first sandbox counts only if it is whole, and only if the launcher would mount the same."""

import subprocess
from pathlib import Path

import pytest

from sandboxes.host.processes import MARKER
from sandboxes.providers.apptainer import setups
from sandboxes.providers.apptainer.launch.container import ContainerCommand
from sandboxes.providers.apptainer.setups import HOST_FILES, REPORT, ContainerSetups
from sandboxes.reclaim.run_folders import RunFolder

KIND = ("--flag", "/image 1:2 3", *HOST_FILES)
MOUNTS = [*sorted(setups.MOUNTS), *HOST_FILES, "/data"]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "0123abcd" / "7")
    folder.path.mkdir(parents=True)
    return folder


@pytest.fixture
def command(folder: RunFolder) -> ContainerCommand:
    root = f"{folder.overlay}/root"
    return ContainerCommand(["apptainer", "exec", "--bind", "/shared:/data:ro", root, "bash"], root)


def report(
    folder: RunFolder, mounts: list[str], *files: str, marker: str | None = None, root: str = "overlay"
) -> bytes:
    """Return what a sandbox reports."""
    environ = [f"{MARKER}={marker or folder.id}", f"HERE={folder.path}/x", "EMPTY=", "LINES=a\nb=c"]
    kinds = {"/": root, "/proc": "proc"}
    table = "".join(f"1 0 0:1 / {path} rw - {kinds.get(path, 'tmpfs')} none rw\n" for path in mounts)
    texts = [str(len(environ)), *environ, "1", table]
    for content in files:
        texts += ["1", content] if content else ["0"]
    return "\0".join(["launch: noise\n", setups.BEGIN, *texts, setups.END, ""]).encode()


def learn(folder: RunFolder, command: ContainerCommand, text: bytes) -> ContainerSetups:
    folder.log.write_bytes(text)
    found = ContainerSetups()
    found.learn(KIND, folder, command)
    assert KIND in found
    return found


def test_another_sandbox_gets_the_environment_and_files_with_its_own_names(folder, command):
    setup = learn(folder, command, report(folder, MOUNTS, "nameserver 1\n", "me:x\n", "")).get(KIND)
    other = RunFolder(folder.path.with_name("8"))
    assert setup.variables(other, "/image") == {
        "LAUNCH_DIRECT": "/image",
        "LAUNCH_ORIGINAL": "/bin/bash",
        f"INSIDE_{MARKER}": other.id,
        "INSIDE_HERE": f"{other.path}/x",
        "INSIDE_EMPTY": "",
        "INSIDE_LINES": "a\nb=c",
        "FILE_/etc/resolv.conf": "nameserver 1\n",
        "FILE_/etc/passwd": "me:x\n",
        "FILE_/etc/group": "",
    }


def test_a_file_that_apptainer_did_not_make_is_left_to_the_image(folder, command):
    text = report(folder, [path for path in MOUNTS if path != "/etc/group"], "n", "p", "of the image")
    assert "/etc/group" not in learn(folder, command, text).get(KIND).files


@pytest.mark.parametrize(
    ("mounts", "changed"),
    [
        ([*MOUNTS, "/more"], {}),
        (MOUNTS[:-1], {}),
        ([path for path in MOUNTS if path != "/proc"], {}),
        (MOUNTS, {"root": "fuse.fuse-overlayfs"}),
        (MOUNTS, {"marker": "0123abcd-70"}),
    ],
    ids=["more mounts", "without a bind", "without /proc", "overlay of a program", "another sandbox"],
)
def test_any_other_container_is_left_to_apptainer(folder, command, mounts, changed):
    assert learn(folder, command, report(folder, mounts, "n", "p", "g", **changed)).get(KIND) is None


@pytest.mark.parametrize("size", range(0, 700, 7))
def test_a_report_that_breaks_off_is_none(folder, command, size):
    whole = report(folder, MOUNTS, "n", "p", "g")
    assert learn(folder, command, whole[: min(size, len(whole) - 2)]).get(KIND) is None


def test_a_mount_without_a_point_is_left_to_apptainer(folder, command):
    text = report(folder, MOUNTS, "n", "p", "g").replace(b"none rw\n", b"none rw\nx\n", 1)
    assert learn(folder, command, text).get(KIND) is None


def test_bash_writes_what_is_read(folder):
    """The counts agree with the texts, also of files that do not exist or are empty, and nothing is left behind."""
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{REPORT} declare -F; env -0"],
        env={MARKER: folder.id, "LINES": "a\nb", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=True,
    )
    texts = done.stdout.decode().split("\0")
    parts = list(setups._parts(texts[texts.index(setups.BEGIN) + 1 : texts.index(setups.END)]))
    assert parts[0] == [f"{MARKER}={folder.id}", "LINES=a\nb", "PATH=/usr/bin:/bin"]
    assert " /proc " in parts[1][0]
    assert [[Path(path).read_text()] for path in HOST_FILES] == parts[2:]
    after = texts[texts.index(setups.END) + 1 :]
    assert set(parts[0]) <= set(after)
    assert not [text for text in after if "report" in text]


def test_a_kind_is_the_command_without_the_names_of_its_sandbox(folder, tmp_path):
    image = tmp_path / "image"
    image.mkdir()
    other = RunFolder(folder.path.with_name("8"))

    def key(where: RunFolder, flag: str = "") -> tuple[str, ...]:
        return ContainerSetups.key(["--bind", f"{where.path}/pipes:/run", f"ID={where.id}", flag], image, where)

    before = key(folder)
    assert key(other) == before != key(other, "--flag")
    image.rmdir()
    assert key(folder) != before


def test_the_oldest_kinds_are_forgotten(folder, command, monkeypatch):
    monkeypatch.setattr(setups, "MAX_SETUPS", 3)
    folder.log.write_bytes(report(folder, MOUNTS, "n", "p", "g"))
    found = ContainerSetups()
    for number in range(5):
        found.learn((str(number), *KIND), folder, command)
    assert [str(number) for number in range(5) if (str(number), *KIND) in found] == ["2", "3", "4"]
