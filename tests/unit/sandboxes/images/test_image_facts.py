"""Facts are read from the files of any image, even a hostile one; unpacking and toolkits happen once."""

import io
import json
import os
import platform
import shutil
import struct
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.errors import ImageError, ImageNotFoundError
from sandboxes.images import squashfs
from sandboxes.images.archives import read_archive, single_image
from sandboxes.images.facts import NEEDED_TOOLS, ImageFacts, read_facts
from sandboxes.images.toolkit import INSIDE, assemble
from sandboxes.images.tree import ELF_MACHINES, ImageTree
from sandboxes.images.unpacked import UnpackedImages

MACHINE = next(number for number, name in ELF_MACHINES.items() if name == platform.machine())


def elf(loader: str | None = "/lib64/ld.so", machine: int = MACHINE) -> bytes:
    """Return an ELF header with a program header for the loader's path, as in elf.h."""
    path = (loader or "").encode() + b"\0"
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHIQQQ", 2, machine, 1, 0, 64, 0)
    head += struct.pack("<IHHHHHH", 0, 64, 56, 1 if loader else 0, 0, 0, 0)
    return head + struct.pack("<IIQQQQQQ", 3, 4, 120, 0, 0, len(path), len(path), 1) + path


def put(root: Path, path: str, data: bytes = b"", mode: int = 0o755) -> None:
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    file.chmod(mode)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an image's root like Debian's: /bin and python3 are links, and ipykernel is in /usr/local."""
    root = tmp_path / "root"
    (root / "usr" / "bin").mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    put(root, "/lib64/ld.so", elf(None))
    put(root, "/usr/bin/bash", elf() + b"@(#)Bash version 5.2.15(1) release GNU")
    for name in NEEDED_TOOLS:
        put(root, f"/usr/bin/{name}", elf())
    put(root, "/usr/bin/python3.11", elf())
    (root / "usr" / "bin" / "python3").symlink_to("python3.11")
    put(root, "/usr/lib/python3.11/os.py", b"#")
    packages = "/usr/local/lib/python3.11/dist-packages"
    put(root, f"{packages}/ipykernel/kernelapp.py", b"#", 0o644)
    put(root, f"{packages}/ipykernel-7.4.0.dist-info/METADATA")
    put(root, "/etc/os-release", b'NAME=x\nPRETTY_NAME="Some System 12"\n')
    put(root, "/.singularity.d/labels.json", json.dumps({"title": "mine"}).encode())
    return root


def test_a_full_image_has_everything(root):
    facts = read_facts(root)
    assert (facts.bash, facts.python, facts.python_version) == ("5.2.15(1)", "/usr/bin/python3", "3.11")
    assert (facts.ipykernel, facts.needs_toolkit, facts.missing, facts.advice) == ("7.4.0", False, (), ())
    assert (facts.system, facts.architecture) == ("Some System 12", platform.machine())
    assert facts.labels == {"title": "mine"}
    assert ImageFacts.from_json(json.loads(json.dumps(facts.as_json()))) == facts


def test_missing_programs_are_reported(root):
    for name in ("bash", "tar", "python3"):
        (root / "usr" / "bin" / name).unlink()
    facts = read_facts(root)
    assert (facts.missing, facts.needs_toolkit) == (("bash", "tar"), True)
    assert "bash" in facts.advice[0]
    assert "tar" in facts.advice[1]
    empty = root.parent / "empty"
    empty.mkdir()
    assert read_facts(empty).missing == ("bash", *NEEDED_TOOLS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("script", "script"),
        ("empty", "script"),
        ("machine", "is for"),
        ("loader", "which is missing"),
        ("library", "standard library"),
        ("kernel", ""),
    ],
)
def test_a_python_that_cannot_run_is_not_used(root, change, problem):
    python = root / "usr" / "bin" / "python3.11"
    if change in {"script", "empty"}:
        python.write_bytes(b"#!/bin/sh\nexit 1\n" if change == "script" else b"")
    if change in {"machine", "loader"}:
        python.write_bytes(elf(machine=40) if change == "machine" else elf("/lib/ld-gone.so"))
    if change == "library":
        shutil.rmtree(root / "usr" / "lib")
        shutil.rmtree(root / "usr" / "local")
    if change == "kernel":
        (root / "usr/local/lib/python3.11/dist-packages/ipykernel/kernelapp.py").unlink()
    facts = read_facts(root)
    assert facts.needs_toolkit
    assert problem in facts.python_problem
    assert facts.advice


def test_python_is_found_on_the_path_that_the_image_declares(root):
    put(root, "/opt/conda/bin/python3.12", elf())
    (root / "opt/conda/bin/python3").symlink_to("python3.12")
    put(root, "/opt/conda/lib/python3.12/site-packages/ipykernel/kernelapp.py", b"#", 0o644)
    put(root, "/opt/conda/lib/python3.12/site-packages/ipykernel-6.29.5.dist-info/METADATA")
    lines = 'export PATH="/opt/conda/bin:/usr/bin"\nexport API_TOKEN="${API_TOKEN:-"hush"}"\n'
    lines += 'export GREETING="${GREETING:-"good day"}"\nexport BROKEN="\n'
    put(root, "/.singularity.d/env/10-docker2singularity.sh", lines.encode())
    facts = read_facts(root)
    assert (facts.python, facts.ipykernel) == ("/opt/conda/bin/python3", "6.29.5")
    assert facts.environment == {"PATH": "/opt/conda/bin:/usr/bin", "GREETING": "good day"}


def test_a_virtual_environment_has_its_own_packages(root):
    (root / "venv" / "bin").mkdir(parents=True)
    (root / "venv/bin/python3").symlink_to("/usr/bin/python3")
    put(root, "/venv/lib/python3.11/site-packages/ipykernel/kernelapp.py", b"#", 0o644)
    put(root, "/venv/lib/python3.11/site-packages/ipykernel-6.1.dist-info/METADATA")
    put(root, "/.singularity.d/env/90-environment.sh", b"export PATH=/venv/bin:$PATH")
    assert read_facts(root).ipykernel == "6.1"


def test_no_link_leads_out_and_no_file_blocks(root, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('PRETTY_NAME="secret"')
    (root / "etc" / "os-release").unlink()
    (root / "etc" / "os-release").symlink_to("../../../../../.." + str(secret))
    bash = root / "usr" / "bin" / "bash"
    bash.unlink()
    bash.symlink_to("/bin/bash")  # a loop inside the image; outside, it would be the host's bash
    os.mkfifo(root / "usr" / "lib" / "os-release")
    facts = read_facts(root)
    assert (facts.system, facts.bash) == (None, None)
    assert ImageTree(root).find("/../../etc") == "/etc"
    assert ImageTree(root).read("/usr/lib/os-release") is None


@pytest.mark.parametrize("labels", [b"[1, 2", b"[" * 100_000], ids=["cut", "deep"])
def test_malformed_labels_and_variables_are_ignored(root, labels):
    put(root, "/.singularity.d/labels.json", labels)
    put(root, "/.singularity.d/env/90-environment.sh", b'\xff\xfe export\nexport\nexport A B\nexport "C=\n=')
    facts = read_facts(root)
    assert (facts.labels, facts.environment) == ({}, {})


def test_no_library_takes_long_to_read(root):
    put(root, "/lib/libc.so.6", b"GNU C Library " * 40_000 + b"\nGNU C Library (Debian 2.36-9) stable version 2.36.\n")
    begun = time.process_time()
    assert read_facts(root).libc == "glibc 2.36"
    assert time.process_time() - begun < 2


@given(st.binary(max_size=300))
def test_no_header_breaks_the_reader(tmp_path_factory, data):
    root = tmp_path_factory.mktemp("root")
    for content in (data, elf()[:80] + data, b"\x7fELF\x02\x01" + data):
        put(root, "/program", content)
        program = ImageTree(root).program("/program")
        assert program is None or content.startswith(b"\x7fELF\x02\x01")
        if program is not None and content.startswith(elf()[:80]):
            assert program.machine == platform.machine()


# --- unpacked images and the toolkit ------------------------------------------------------------------------


@pytest.fixture
def unpacked(tmp_path: Path) -> UnpackedImages:
    """Return a store of unpacked images whose Apptainer reports where the squashfs begins."""
    apptainer = tmp_path / "apptainer"
    apptainer.write_text("#!/bin/sh\necho '4    |1   |NONE  |0-99999   |FS (Squashfs/*System/amd64)'\n")
    apptainer.chmod(0o755)
    return UnpackedImages(apptainer, tmp_path / "cache" / "unpacked", os.getuid(), os.getgid())


def image_of(root: Path, path: Path) -> Path:
    subprocess.run(["mksquashfs", root, path, "-quiet", "-no-progress", "-noappend"], check=True)
    return path


def test_an_image_is_unpacked_and_read_once(unpacked, root, tmp_path):
    image = image_of(root, tmp_path / "image.sif")
    first = unpacked.provide(image)
    assert first.facts.ipykernel == "7.4.0"
    assert (first.folder / "usr/bin/python3.11").is_file()
    assert first.folder.parent.stat().st_mode & 0o077 == 0, "nobody else can reach what sandboxes run from"
    made = first.folder.stat().st_ino
    assert unpacked.provide(image) == first
    again = UnpackedImages(Path("/nowhere"), first.folder.parent, os.getuid(), os.getgid())
    assert again.provide(image) == first
    assert again.facts(image) == first.facts
    assert first.folder.stat().st_ino == made
    image_of(root / "usr", image)
    assert unpacked.provide(image).folder != first.folder, "an image that is written again is another"


def test_inspecting_an_image_leaves_it_packed(unpacked, root, tmp_path):
    image = image_of(root, tmp_path / "image.sif")
    assert unpacked.facts(image).ipykernel == "7.4.0"
    assert unpacked.prune(0, grace_seconds=0) == []
    assert list((tmp_path / "cache/unpacked/drafts").iterdir()) == []


def test_unpacked_images_stay_within_the_budget(unpacked, root, tmp_path):
    old, new = (image_of(root, tmp_path / f"{name}.sif") for name in ("old", "new"))
    folders = [unpacked.provide(image).folder for image in (old, new)]
    for folder, when in zip(folders, (1000, 2000), strict=True):
        for stamp in (folder.parent / "uses" / folder.name).iterdir():
            os.utime(stamp, (when, when))
    assert [one.evicted for one in unpacked.prune(0)] == [False, False], "they may be about to be mounted"
    size = unpacked.facts(new).size_bytes
    decided = unpacked.prune(size, grace_seconds=0)
    assert sum(one.evicted for one in decided) == 1
    assert [folder.exists() for folder in folders].count(True) == 1
    assert {one.of for one in decided} == {str(old), str(new)}
    assert unpacked.provide(old).folder.exists()


def test_images_that_are_gone_or_replaced_are_evicted_within_the_budget(unpacked, root, tmp_path):
    gone, replaced, kept = (image_of(root, tmp_path / f"{name}.sif") for name in ("gone", "replaced", "kept"))
    folders = [unpacked.provide(image).folder for image in (gone, replaced, kept)]
    gone.unlink()
    image_of(root / "usr", replaced)
    assert not any(one.evicted for one in unpacked.prune(None)), "they may be about to be mounted"
    decided = unpacked.prune(None, grace_seconds=0)
    assert [folder.exists() for folder in folders] == [False, False, True]
    assert [(one.useless, one.evicted) for one in decided] == [(True, True), (True, True), (False, False)]


def test_a_full_disk_is_freed_of_what_nobody_uses(unpacked, root, tmp_path, monkeypatch):
    old, new = (image_of(root, tmp_path / f"{name}.sif") for name in ("old", "new"))
    folder = unpacked.provide(old).folder
    unpack = squashfs.unpack

    def fill(apptainer: Path, image: Path, target: Path) -> None:
        if folder.exists():
            raise ImageError("the image could not be unpacked: Write on output file failed: No space left on device")
        unpack(apptainer, image, target)

    monkeypatch.setattr("sandboxes.images.squashfs.unpack", fill)
    with pytest.raises(ImageError, match="No space left"):
        unpacked.provide(new)
    assert folder.exists(), "it may be about to be mounted"
    monkeypatch.setattr("sandboxes.images.unpacked.GRACE_SECONDS", 0)
    assert unpacked.provide(new).folder.exists()
    assert not folder.exists()


def test_mounted_images_are_not_evicted(unpacked, root, tmp_path, monkeypatch):
    folder = unpacked.provide(image_of(root, tmp_path / "image.sif")).folder
    monkeypatch.setattr("sandboxes.images.unpacked.mounted_folders", lambda: {folder.name})
    (decided,) = unpacked.prune(0, grace_seconds=0)
    assert (decided.evicted, decided.kept) == (False, "a sandbox has it mounted")


def test_a_file_that_is_not_an_image_is_refused(tmp_path, unpacked):
    fake = tmp_path / "fake.sif"
    fake.write_text("not an image")
    with pytest.raises(ImageError, match="could not be unpacked"):
        unpacked.provide(fake)
    with pytest.raises(ImageError, match="cannot read the image"):
        unpacked.provide(tmp_path / "missing.sif")
    assert list((tmp_path / "cache/unpacked/drafts").iterdir()) == []


def test_a_toolkit_is_made_of_links(root, tmp_path, unpacked):
    put(root, "/lib64/libc.so.6", b"library")
    image = image_of(root, tmp_path / "image.sif")
    toolkit = unpacked.toolkit(image)
    assert unpacked.toolkit(image) == toolkit
    base = unpacked.provide(image).folder
    assert (toolkit / "bin/python3.11").samefile(base / "usr/bin/python3.11")
    assert (toolkit / "libraries/libc.so.6").samefile(base / "lib64/libc.so.6")
    assert (toolkit / "local/lib/python3.11/dist-packages/ipykernel/kernelapp.py").is_file()
    wrapper = (toolkit / "bin/python3").read_text()
    assert f"{INSIDE}/libraries/ld.so" in wrapper
    unpacked.prune(0, grace_seconds=0)
    assert not toolkit.exists()
    assert unpacked.toolkit(image).exists()


def test_no_toolkit_is_made_from_an_image_without_ipykernel(root, tmp_path):
    shutil.rmtree(root / "usr" / "local")
    with pytest.raises(ImageError, match="no python3 with ipykernel"):
        assemble(root, read_facts(root), tmp_path)


PASSWD = "root:x:0:0::/root:/bin/sh\napp:x:7:7::/home/app:/bin/sh\nodd:x:8:8::not-a-path:/bin/sh\nshort:x:9\n"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("/app", "/app"),
        ("/app/../b//", "/b"),
        ("/", None),
        ("", None),
        ("app", None),
        ("/a\nb", None),
        ("/a\0", None),
    ],
)
def test_working_folders(tmp_path, named, expected):
    assert read_facts(tmp_path, {"WorkingDir": named}).workdir == expected


@pytest.mark.parametrize(
    ("named", "user", "home"),
    [
        ("app", "app", "/home/app"),
        ("7:7", "app", "/home/app"),
        ("0", None, None),
        ("root:root", None, None),
        ("", None, None),
        ("1000", "1000", None),
        ("odd", "odd", None),
        ("short", "short", None),
        ("a\nb", None, None),
    ],
)
def test_users(tmp_path, named, user, home):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD)
    found = read_facts(tmp_path, {"User": named, "WorkingDir": 7})
    assert (found.user, found.home) == (user, home)
    assert found.user_env == ({} if user is None else {"HOME": home or "/", "USER": user, "LOGNAME": user})


NAME = "org.opencontainers.image.ref.name"
INDEX = {"manifests": [{"digest": "a", "annotations": {NAME: "one:1"}}, {"digest": "b"}]}
SAVED = [{"Config": "c", "RepoTags": ["r.io/one:1", "one:latest"]}, {"Config": "d", "RepoTags": None}]


def make(path: Path, mode: str = "w", prefix: str = "", **documents: object) -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in documents.items():
            data = json.dumps(content).encode()
            member = tarfile.TarInfo(f"{prefix}{name}.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def test_kinds_and_tags(tmp_path):
    found = read_archive(make(tmp_path / "oci.tar", index=INDEX))
    assert (found.kind, found.images, found.plain) == ("oci-archive", (("one:1",), ()), True)
    found = read_archive(make(tmp_path / "docker.tar.gz", "w:gz", "./", manifest=SAVED, index=INDEX))
    assert (found.kind, found.tags, found.plain) == ("docker-archive", ("r.io/one:1", "one:latest"), False)
    assert (found.number_of("one:1"), found.number_of("one:latest")) == (0, 0)
    with pytest.raises(ImageNotFoundError, match="has 2 images") as caught:
        found.number_of(None)
    assert caught.value.hint == "choose one with --tag; its tags are: r.io/one:1, one:latest"


def test_one_image_is_copied_where_apptainer_needs_that(tmp_path):
    file = make(tmp_path / "many.tar.gz", "w:gz", "./", manifest=SAVED, index=INDEX, repositories={})
    copy = single_image(read_archive(file), "one:latest", tmp_path)
    found = read_archive(copy)
    assert (found.kind, found.images, found.plain) == (
        "docker-archive",
        (("r.io/one:1", "one:latest"),),
        True,
    )
    assert single_image(found, None, tmp_path) == copy, "it is used as it is"


@pytest.mark.parametrize("content", [b"", b"not an archive", b"\x1f\x8b broken"])
def test_other_files_are_refused(tmp_path, content):
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(ImageError):
        read_archive(file)
    with pytest.raises(ImageNotFoundError):
        read_archive(tmp_path / "none")


def test_an_archive_of_other_things_is_refused(tmp_path):
    with pytest.raises(ImageError, match="neither index"):
        read_archive(make(tmp_path / "x.tar", other={}))
    with pytest.raises(ImageError, match="neither"):
        read_archive(make(tmp_path / "y.tar", manifest=[], index={}))


@pytest.mark.parametrize(
    "documents",
    [
        {"manifest": ["x"]},
        {"manifest": [{"RepoTags": 7}]},
        {"index": {"manifests": 7}},
        {"index": {"manifests": {"a": 1}}},
        {"index": {"manifests": [{"annotations": 7}]}},
    ],
)
def test_an_archive_whose_documents_have_another_form_is_refused(tmp_path, documents):
    with pytest.raises(ImageError, match="cannot read"):
        single_image(read_archive(make(tmp_path / "x.tar", **documents)), None, tmp_path)


def test_an_archive_with_a_bottomless_document_is_refused(tmp_path):
    monster = b"[" * 200_000
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        member = tarfile.TarInfo("index.json")
        member.size = len(monster)
        tar.addfile(member, io.BytesIO(monster))
    with pytest.raises(ImageError, match="cannot read"):
        read_archive(tmp_path / "x.tar")
