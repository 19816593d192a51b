"""The image store builds each image once, never shows half an image, and survives failed or killed builds."""

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.errors import ImageBuildError, ImageError, ImageNotFoundError
from sandboxes.images.build import ApptainerBuilder, Progress, hint_for
from sandboxes.images.eviction import EvictionCandidate, choose_evictions
from sandboxes.images.sources import (
    Definition,
    Reference,
    Source,
    Tree,
    name_of_reference,
    packaged,
    packaged_names,
    source_of_reference,
)
from sandboxes.images.store import NAME, ImageStore, _hash, default_cache
from tests.support.processes.children import killed

pytestmark = pytest.mark.slow


@dataclass
class CountingBuilder:
    """A builder that writes what it was asked for; it can be told to fail halfway, or to wait."""

    version: str = "counting:1"
    fails: bool = False
    calls: list[str] = field(default_factory=list)
    begun: list[Path | None] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.released.set()

    def build(self, source: Source, target: Path, progress: Progress) -> None:
        self.begun.append(source.begin if isinstance(source, Definition) else None)
        self._make(target, f"{source} {' '.join(source.identity())}", progress)

    def _make(self, target: Path, content: str, progress: Progress) -> None:
        self.calls.append(content)
        self.started.set()
        target.write_text("half")
        assert self.released.wait(30)
        if self.fails:
            raise ImageBuildError("told to fail")
        progress("made")
        target.write_text(f"{content} {len(self.calls)}")


@pytest.fixture
def builder() -> CountingBuilder:
    return CountingBuilder()


@pytest.fixture
def store(tmp_path: Path, builder: CountingBuilder) -> ImageStore:
    return ImageStore(tmp_path / "images", builder)


@pytest.fixture
def definition(tmp_path: Path) -> Definition:
    path = tmp_path / "calc.def"
    path.write_text("Bootstrap: scratch\n")
    return Definition(path)


def files_of(store: ImageStore) -> list[str]:
    """Return the image files, without stamps and without the locks, which stay."""
    paths = (path.relative_to(store.root) for path in store.root.rglob("*") if path.is_file())
    found = [path for path in paths if path.parts[0] not in {"locks", "uses"} and path.suffix != ".json"]
    return sorted(str(path) for path in found)


def drafts_of(store: ImageStore) -> list[Path]:
    return list((store.root / "drafts").glob("*"))


def test_building_again_is_a_look_up(store, builder, definition):
    lines: list[str] = []
    first = store.provide(definition, "calc", progress=lines.append)
    again = store.provide(definition, "calc")
    assert again == first
    assert (len(builder.calls), lines) == (1, ["made"])
    assert store.resolve("calc") == first.path == store.root / "calc.sif"
    assert first.size_bytes == first.path.stat().st_size > 0


def test_force_replaces_the_image(store, builder, definition):
    first = store.provide(definition, "calc")
    mounted = first.path.open()
    after = store.provide(definition, "calc", force=True).path.read_text()
    with mounted:
        assert (mounted.read()[-1], after[-1], len(builder.calls)) == ("1", "2", 2)
    assert len(files_of(store)) == 2, "the one that was replaced is removed"
    assert store.provide(definition, "calc").path.read_text() == after, "and the newer one is found"


def test_a_definition_with_arguments_begins_with_the_image_of_the_same_one_without(store, builder, definition):
    more = Definition(definition.path, {"A": "1"})
    store.provide(more, "early")
    plain = store.provide(definition, "calc").path.resolve()
    store.provide(Definition(definition.path, {"A": "2"}), "more")
    store.provide(more, "early", force=True)
    assert builder.begun == [None, None, plain, None], "one that is made anew has the newest packages"
    definition.path.write_text("Bootstrap: localimage\n")
    store.provide(more, "early")
    assert builder.begun[-1] is None


@pytest.mark.parametrize("change", ["definition", "arguments", "builder"])
def test_any_change_of_the_source_gives_another_image(store, builder, definition, change):
    first = store.provide(Definition(definition.path, {"A": "1"}))
    if change == "definition":
        definition.path.write_text("Bootstrap: localimage\n")
    if change == "builder":
        builder.version = "counting:2"
    second = store.provide(Definition(definition.path, {"A": "2" if change == "arguments" else "1"}))
    assert second.key != first.key
    assert len(builder.calls) == 2
    assert len(files_of(store)) == 2, "the image that no name has any more is removed"


def test_two_names_of_the_same_image_share_it(store, builder, definition):
    assert store.provide(definition, "one").key == store.provide(definition, "two").key
    assert len(builder.calls) == 1
    store.remove("one")
    assert [stored.name for stored in store.list()] == ["two"]
    assert store.resolve("two").read_text()
    store.remove("two")
    assert files_of(store) == []


@pytest.mark.parametrize("there_before", [False, True])
def test_a_failed_build_leaves_everything_as_it_was(store, builder, definition, there_before):
    if there_before:
        store.provide(definition, "calc")
    before = files_of(store), [stored.path.read_text() for stored in store.list()]
    builder.fails = True
    with pytest.raises(ImageBuildError, match="told to fail"):
        store.provide(definition, "calc", force=True)
    assert (files_of(store), [stored.path.read_text() for stored in store.list()]) == before
    assert drafts_of(store) == []


def test_two_builders_at_once_do_the_work_once(tmp_path, builder, definition):
    stores = [ImageStore(tmp_path / "images", builder) for _ in range(2)]
    builder.released.clear()
    waits = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(stores[0].provide, definition, "calc")
        assert builder.started.wait(30)
        second = threads.submit(stores[1].provide, definition, "calc", progress=lambda _line: waits.set())
        assert waits.wait(30), "the second says that it waits"
        builder.released.set()
        assert first.result(30) == second.result(30)
    assert len(builder.calls) == 1


def test_an_image_in_the_making_is_not_collected(tmp_path, builder, definition):
    store = ImageStore(tmp_path / "images", builder)
    builder.released.clear()
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(store.provide, definition, "slow")
        assert builder.started.wait(30)
        other = ImageStore(tmp_path / "images", CountingBuilder())
        other.provide(Reference("docker://debian:12"), "quick")
        builder.released.set()
        assert slow.result(30).path.read_text()
    assert [stored.name for stored in store.list()] == ["quick", "slow"]


def test_resolve_takes_names_paths_and_pulled_references(store, tmp_path):
    file = tmp_path / "mine.sif"
    file.touch()
    assert store.resolve(file) == file
    assert store.resolve(str(tmp_path)) == tmp_path
    pulled = store.provide(Reference("docker://Python:3.12-slim"))
    assert pulled.name == "python-3.12-slim"
    assert store.resolve("docker://Python:3.12-slim").samefile(store.resolve(pulled.name))


@pytest.mark.parametrize(
    ("image", "hint"),
    [
        ("base", "rollout-service image build base"),
        ("mine", "--definition FILE"),
        ("docker://debian:12", "rollout-service image pull docker://debian:12"),
        ("oci-archive:/nowhere/x.tar", "rollout-service image pull oci-archive:/nowhere/x.tar"),
        ("/nowhere/mine.sif", "name an image file"),
        ("Not A Name", "lower-case letters"),
        ("..", "lower-case letters"),
    ],
)
def test_the_error_for_a_missing_image_says_how_to_make_it(store, image, hint):
    store.provide(Reference("docker://debian:11"), "here")
    with pytest.raises(ImageNotFoundError) as caught:
        store.resolve(image)
    assert hint in caught.value.hint
    if "letters" not in hint:
        assert "images here: here" in str(caught.value)


def test_an_image_put_there_by_hand_has_its_name(store):
    store.root.mkdir()
    (store.root / "mine.sif").write_text("image")
    assert [(stored.name, stored.key) for stored in store.list()] == [("mine", "")]
    store.remove("mine")
    assert store.list() == []


def test_errors_are_typed(store, tmp_path):
    with pytest.raises(ImageNotFoundError, match="no built-in definition 'calc'; built in are: base"):
        packaged("calc")
    with pytest.raises(ImageNotFoundError, match="cannot read"):
        store.provide(Definition(tmp_path / "missing.def"), "calc")
    with pytest.raises(ImageError, match="not a reference"):
        store.provide(Reference("debian:12"))
    with pytest.raises(ImageNotFoundError, match="cannot read"):
        store.provide(source_of_reference(f"docker-archive:{tmp_path}/missing.tar"))
    with pytest.raises(ImageNotFoundError, match="not a folder"):
        store.provide(Tree(tmp_path / "missing"))
    with pytest.raises(ImageError, match="no /bin/bash"):
        store.provide(Tree(tmp_path))
    with pytest.raises(ImageNotFoundError, match="no image 'calc'"):
        store.remove("calc")
    with pytest.raises(ImageError, match="File name too long"):
        store.resolve(tmp_path / ("x" * 300))


@pytest.mark.parametrize("secret", ["docker://me:hush@ghcr.io/org/image:1", "docker://me:hush@image"])
def test_a_password_in_a_reference_is_refused_and_not_repeated(store, secret):
    for act in (store.resolve, lambda text: store.provide(Reference(text))):
        with pytest.raises(ImageError, match="contains a password") as caught:
            act(secret)
        assert "hush" not in f"{caught.value} {caught.value.hint}"
    assert store.resolve(store.provide(Reference("docker://debian:12@sha256:0123")).name)


def test_a_changed_file_makes_a_tree_another_source(store, builder, tmp_path):
    tree = tmp_path / "root"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "bash").write_text("bash")
    first = store.provide(Tree(tree))
    assert (first.name, store.provide(Tree(tree))) == ("root", first)
    (tree / "bin" / "bash").write_text("basH")
    os.utime(tree / "bin" / "bash", ns=(1, 1))
    assert store.provide(Tree(tree)).key != first.key
    assert len(builder.calls) == 2


def test_a_rewritten_archive_is_another_source(store, tmp_path):
    plain = tmp_path / "tiny.tar"
    plain.write_text("one")
    reference = source_of_reference(f"oci-archive:{plain}")
    first = store.provide(reference)
    assert first.name == "tiny"
    assert store.resolve(f"oci-archive:{plain}").samefile(first.path)
    plain.write_text("three")
    assert store.provide(reference).key != first.key


# --- killed builders ----------------------------------------------------------------------------------------

BUILDER = """
import sys, time
from pathlib import Path
from sandboxes.images.sources import Definition
from sandboxes.images.store import ImageStore

class Slow:
    version = "slow:1"
    def build(self, source, target, progress):
        with target.open("w") as file:
            for _ in range(100):
                file.write("x" * 100)
                file.flush()
                time.sleep(0.0005)
            file.write("end")

store = ImageStore(Path(sys.argv[1]), Slow())
source = Definition(Path(sys.argv[2]))
print("begun", flush=True)
while True:
    store.provide(source, "calc", force=True)
    store.provide(source, "other")
"""


def test_builders_killed_at_any_moment_leave_a_store_that_works(tmp_path, builder, definition):
    root = tmp_path / "images"
    store = ImageStore(root, builder)
    command = [sys.executable, "-c", BUILDER, str(root), str(definition.path)]
    for moment in (0.01, 0.05, 0.1, 0.15, 0.2, 0.25):
        with ExitStack() as stack:
            builders = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
            for worker in [stack.enter_context(killed(started)) for started in builders]:
                assert worker.stdout.readline() == b"begun\n"
            time.sleep(moment)  # any moment will do, since a builder is always in the middle of something
        for stored in store.list():
            assert stored.path.read_text().endswith("end"), "a name never has half of an image"
    made = store.provide(definition, "mine")
    assert made.path.read_text()
    assert drafts_of(store) == []
    for stored in store.list():
        store.remove(stored.name)
    assert files_of(store) == []


NODE = """
import sys
from pathlib import Path
import sandboxes.images.shared_folder as shared
from sandboxes.errors import ImageNotFoundError
from sandboxes.images.sources import Definition
from sandboxes.images.store import ImageStore

class Quick:
    version = "quick:1"
    def build(self, source, target, progress):
        target.write_text("x" * 10000 + "end")

def no_locks(file, operation):
    raise OSError(38, "Function not implemented")

shared.boot_id = lambda: sys.argv[3]
shared.fcntl.flock = no_locks
store = ImageStore(Path(sys.argv[1]), Quick())
source = Definition(Path(sys.argv[2]))
for number in range(40):
    made = store.provide(source, f"name{number % 3}", force=number % 4 == 0)
    for stored in store.list():
        try:
            assert stored.path.read_text().endswith("end")
        except FileNotFoundError:
            pass  # removed by another node
    try:
        store.remove(f"name{(number + 1) % 3}")
    except ImageNotFoundError:
        pass
    store.prune(0)
"""


def test_nodes_that_see_no_locks_of_each_other_do_no_harm(tmp_path, store, definition):
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE, str(store.root), str(definition.path), f"{number}f0f0f0f0f0f"],
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    with ExitStack() as stack:
        for node in [stack.enter_context(killed(started)) for started in nodes]:
            said = node.communicate(timeout=60)[1]
            assert node.returncode == 0, said
    names = list(store.root.glob("*.sif"))
    assert names
    assert all(name.read_text().endswith("end") for name in names), "no name leads to nothing, or to half"


def test_a_draft_of_another_machine_stays_until_it_is_silent(store, definition):
    theirs = store.root / "drafts" / "0123~0f0f0f-4026531836-77-1234-abcd"
    theirs.mkdir(parents=True)
    store.provide(definition)
    assert theirs.exists()
    os.utime(theirs, (0, 0))
    store.provide(definition, force=True)
    assert not theirs.exists()


def test_a_draft_whose_pid_was_reused_is_removed(store, definition):
    with store._shared.draft("mine") as mine:
        machine, pid, start, rest = mine.name.rsplit("-", 3)
        left = mine.with_name(f"{machine}-{pid}-{int(start) - 1}-{rest}")
        left.mkdir()
        store.provide(definition)
        assert (mine.exists(), left.exists()) == (True, False)


def test_a_file_that_another_node_uses_is_not_removed(store, definition):
    key = store.provide(definition, "calc").key
    stamp = store.root / "uses" / key / "other-0f0f0f0f"
    stamp.touch()
    store.remove("calc")
    assert files_of(store) == [f"blobs/{key}.sif"]
    os.utime(stamp, (0, 0))
    store.prune(None)
    assert files_of(store) == []


def test_a_folder_that_cannot_be_locked_works(store, definition, monkeypatch):
    def no_locks(_file: object, _operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("sandboxes.images.shared_folder.fcntl.flock", no_locks)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda number: store.provide(definition, f"calc{number}"), range(8)))
    assert len({one.key for one in made}) == 1
    assert len(store.list()) == 8
    assert all(one.path.read_text() for one in made)


# --- the budget ---------------------------------------------------------------------------------------------


def test_the_budget_takes_pulled_images_first_and_the_least_recently_used_of_each(store, definition):
    store.provide(definition, "built")
    for number in range(3):
        store.provide(Reference(f"docker://debian:{number}"), f"pulled{number}")
    (store.root / "mine.sif").write_text("by hand")
    for age, name in enumerate(["pulled1", "pulled0", "built", "pulled2"]):
        file = store.resolve(name).resolve()
        os.utime(file, (1, 1))
        for stamp in (store.root / "uses" / file.stem).iterdir():
            os.utime(stamp, (1000 + age, 1000 + age))
    size = store.resolve("pulled0").stat().st_size
    total = sum(image.size_bytes for image in store.list())
    dry = store.prune(total - size - 1, keep=["pulled1"], dry_run=True)
    assert len(store.list()) == 5
    decided = store.prune(total - size - 1, keep=["pulled1"])
    assert decided == dry
    assert {one.name for one in decided if one.evicted} == {"pulled0", "pulled2"}
    assert [image.name for image in store.list()] == ["built", "mine", "pulled1"]
    store.prune(0, keep=["pulled1"])
    assert [image.name for image in store.list()] == ["mine", "pulled1"]


def test_a_recently_used_image_is_not_evicted(store, definition):
    store.provide(definition, "calc")
    (decided,) = store.prune(0)
    assert (decided.evicted, decided.kept[:4]) == (False, "used")
    (decided,) = store.prune(0, grace_seconds=0)
    assert decided.evicted
    assert store.list() == []


def test_pruning_a_missing_store_creates_nothing(tmp_path, builder):
    assert list(ImageStore(tmp_path / "none", builder).prune(0)) == []
    assert not (tmp_path / "none").exists()


candidates = st.lists(
    st.builds(
        EvictionCandidate,
        kind=st.just("image"),
        name=st.text("abc", min_size=1),
        size_bytes=st.integers(0, 100),
        last_used=st.floats(0, 100),
        rank=st.integers(0, 2),
        kept=st.sampled_from(["", "why"]),
    )
)


@given(candidates, st.integers(0, 500))
def test_no_more_is_evicted_than_the_budget_requires(ones, budget):
    decided = choose_evictions(ones, budget)
    gone = [one for one in decided if one.evicted]
    assert not any(one.kept for one in gone)
    stays = sum(one.size_bytes for one in decided if not one.evicted)
    if any(not one.kept and not one.evicted for one in decided):
        assert stays <= budget
    if gone:
        assert stays + gone[-1].size_bytes > budget, "the last one had to go"
    free = [one for one in decided if not one.kept]
    assert [one.evicted for one in free] == sorted((one.evicted for one in free), reverse=True)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("dial tcp: lookup registry: no such host", "cannot be reached"),
        ("UNAUTHORIZED: authentication required", "registry login"),
        ("MANIFEST_UNKNOWN: manifest unknown", "no such image or tag"),
        ("write /tmp/x: no space left on device", "APPTAINER_TMPDIR"),
        ("FATAL: could not use fakeroot: no mapping entry found in /etc/subuid for me", "--add-subuids"),
        ("Requesting capability set 0x1 while permitted capability set is 0x0", "--tree"),
        ("mount: permission denied", "the builder's last lines"),
        ("something else", "the builder's last lines"),
    ],
)
def test_failures_have_hints(said, hint):
    assert hint in hint_for(said)


def test_a_definition_finds_the_programs_of_administrators(definition, tmp_path, monkeypatch):
    """One is `chroot` in /usr/sbin, which on Debian is not on an ordinary user's PATH."""
    program = tmp_path / "apptainer"
    program.write_text(
        '#!/bin/sh\ncase $1 in --version) echo "apptainer version 1.3.6" ;; *) echo "$PATH"; exit 1 ;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("ROLLOUT_APPTAINER", str(program))
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin:/bin")
    with pytest.raises(ImageBuildError) as caught:
        ApptainerBuilder().build(definition, tmp_path / "image.sif", lambda _: None)
    path = str(caught.value).splitlines()[-1].split(":")
    assert path[:3] == ["/usr/local/bin", "/usr/bin", "/bin"]
    assert {"/usr/sbin", "/sbin"} <= set(path)


def test_the_default_root_follows_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ROLLOUT_IMAGES_DIR", raising=False)
    assert ImageStore().root == default_cache() / "images" == tmp_path / "rollout-service" / "images"
    monkeypatch.setenv("ROLLOUT_IMAGES_DIR", str(tmp_path / "elsewhere"))
    assert ImageStore().root == tmp_path / "elsewhere", "as the service's settings have it"


def test_base_is_packaged_and_pins_what_the_lock_pins():
    assert "base" in packaged_names()
    text = packaged("base").path.read_text()
    lock = (Path(__file__).parents[4] / "requirements.lock").read_text()
    locked = {line.split(" ", 1)[0] for line in lock.splitlines() if "==" in line}
    pins = re.findall(r"^\s*([\w.-]+==\S+) \\$", text, re.MULTILINE)
    assert len(pins) > 20
    assert set(pins) <= locked


@given(st.lists(st.text(), min_size=1), st.lists(st.text(), min_size=1))
def test_keys_are_equal_exactly_if_the_parts_are(first, second):
    assert (_hash(*first) == _hash(*second)) == (first == second)


@given(st.text(min_size=1))
def test_names_of_references_are_names(text):
    name = name_of_reference(f"docker://x{text}")
    assert NAME.fullmatch(name)


def test_a_folder_that_cannot_be_written_is_named(definition, tmp_path):
    (tmp_path / "file").touch()
    store = ImageStore(tmp_path / "file" / "images", CountingBuilder())
    with pytest.raises(ImageBuildError, match="cannot write to") as caught:
        store.provide(definition, "calc")
    assert "ROLLOUT_IMAGES_DIR" in caught.value.hint


def test_an_existing_image_is_found_in_a_read_only_store(store, definition, monkeypatch):
    made = store.provide(definition, "calc")

    def refuse(*_arguments: object, **_named: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("mkdir", "touch"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr("sandboxes.images.shared_folder.SharedFolder.lock", refuse)
    reader = ImageStore(store.root, CountingBuilder())
    assert reader.provide(Definition(definition.path), "calc").key == made.key
    assert reader.resolve("calc") == made.path
