"""The image store: names, the cache, locks, and what a failed or killed build leaves."""

import threading
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.errors import ImageBuildError, ImageError, ImageNotFoundError
from sandboxes.image_build import DEFINITIONS, ImageInfo, Progress, packaged_definition, packaged_names
from sandboxes.images import NAME, ImageStore, _key, _name_of, default_root


@dataclass
class CountingBuilder:
    """Writes what it was asked for; can be told to fail after half of the work, or to wait."""

    version: str = "counting:1"
    fails: bool = False
    calls: list[str] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.released.set()

    def build(self, definition: Path, target: Path, arguments: Mapping[str, str], progress: Progress) -> None:
        self._make(target, f"{definition.read_text()} {dict(arguments)}", progress)

    def pull(self, reference: str, target: Path, progress: Progress) -> None:
        self._make(target, reference, progress)

    def inspect(self, image: Path) -> ImageInfo:
        return ImageInfo(image, image.stat().st_size, bash="5.2", python=None, ipykernel=None)

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
def definition(tmp_path: Path) -> Path:
    path = tmp_path / "calc.def"
    path.write_text("Bootstrap: scratch\n")
    return path


def files_of(store: ImageStore) -> list[str]:
    """Everything but the locks, which stay."""
    paths = (path.relative_to(store.root) for path in store.root.rglob("*") if path.is_file())
    return sorted(str(path) for path in paths if path.parts[0] != "locks")


def test_building_again_is_a_look_up(store: ImageStore, builder: CountingBuilder, definition: Path) -> None:
    lines: list[str] = []
    first = store.build("calc", definition, progress=lines.append)
    again = store.build("calc", definition)
    assert again == first
    assert (len(builder.calls), lines) == (1, ["made"])
    assert store.resolve("calc") == first.path == store.root / "calc.sif"
    assert first.size_bytes == first.path.stat().st_size > 0


def test_force_replaces_the_image(store: ImageStore, builder: CountingBuilder, definition: Path) -> None:
    before = store.build("calc", definition).path.read_text()
    after = store.build("calc", definition, force=True).path.read_text()
    assert (before[-1], after[-1], len(builder.calls)) == ("1", "2", 2)


@pytest.mark.parametrize("change", ["definition", "arguments", "builder"])
def test_whatever_an_image_is_made_from_makes_it_another(
    store: ImageStore, builder: CountingBuilder, definition: Path, change: str
) -> None:
    first = store.build("calc", definition, arguments={"A": "1"})
    if change == "definition":
        definition.write_text("Bootstrap: localimage\n")
    if change == "builder":
        builder.version = "counting:2"
    second = store.build("calc", definition, arguments={"A": "2" if change == "arguments" else "1"})
    assert second.key != first.key
    assert len(builder.calls) == 2
    assert len(files_of(store)) == 2, "the image that no name has any more is removed"


def test_two_names_of_the_same_image_share_it(
    store: ImageStore, builder: CountingBuilder, definition: Path
) -> None:
    assert store.build("one", definition).key == store.build("two", definition).key
    assert len(builder.calls) == 1
    store.remove("one")
    assert [stored.name for stored in store.list()] == ["two"]
    assert store.resolve("two").read_text()
    store.remove("two")
    assert files_of(store) == []


@pytest.mark.parametrize("there_before", [False, True])
def test_a_failed_build_leaves_everything_as_it_was(
    store: ImageStore, builder: CountingBuilder, definition: Path, there_before: bool
) -> None:
    if there_before:
        store.build("calc", definition)
    before = files_of(store), [stored.path.read_text() for stored in store.list()]
    builder.fails = True
    with pytest.raises(ImageBuildError, match="told to fail"):
        store.build("calc", definition, force=True)
    assert (files_of(store), [stored.path.read_text() for stored in store.list()]) == before


def test_what_a_killed_build_left_is_removed_by_the_next(store: ImageStore, definition: Path) -> None:
    left = store.root / "blobs" / "0123.partial"
    left.mkdir(parents=True)
    (left / "0123.sif").write_text("half")
    store.build("calc", definition)
    assert not left.exists()


def test_two_builders_at_once_do_the_work_once(
    tmp_path: Path, builder: CountingBuilder, definition: Path
) -> None:
    stores = [ImageStore(tmp_path / "images", builder) for _ in range(2)]
    builder.released.clear()
    waits = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(stores[0].build, "calc", definition)
        assert builder.started.wait(30)
        second = threads.submit(stores[1].build, "calc", definition, progress=lambda _line: waits.set())
        assert waits.wait(30), "the second says that it waits"
        builder.released.set()
        assert first.result(30) == second.result(30)
    assert len(builder.calls) == 1


def test_an_image_in_the_making_is_not_collected(
    tmp_path: Path, builder: CountingBuilder, definition: Path
) -> None:
    store = ImageStore(tmp_path / "images", builder)
    builder.released.clear()
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(store.build, "slow", definition)
        assert builder.started.wait(30)
        other = ImageStore(tmp_path / "images", CountingBuilder())
        other.pull("docker://debian:12", "quick")
        builder.released.set()
        assert slow.result(30).path.read_text()
    assert [stored.name for stored in store.list()] == ["quick", "slow"]


def test_resolve_takes_names_paths_and_pulled_references(store: ImageStore, tmp_path: Path) -> None:
    file = tmp_path / "mine.sif"
    file.touch()
    assert store.resolve(file) == file
    assert store.resolve(str(tmp_path)) == tmp_path
    pulled = store.pull("docker://Python:3.12-slim")
    assert pulled.name == "python-3.12-slim"
    assert store.resolve("docker://Python:3.12-slim").samefile(store.resolve(pulled.name))


@pytest.mark.parametrize(
    ("image", "hint"),
    [
        ("base", "rollout-service image build base"),
        ("mine", "--definition FILE"),
        ("docker://debian:12", "rollout-service image pull docker://debian:12"),
        ("/nowhere/mine.sif", "name an image file"),
        ("Not A Name", "small letters"),
        ("..", "small letters"),
    ],
)
def test_a_missing_image_says_what_makes_it(store: ImageStore, image: str, hint: str) -> None:
    store.pull("docker://debian:11", "here")
    with pytest.raises(ImageNotFoundError) as caught:
        store.resolve(image)
    assert hint in caught.value.hint
    if "letters" not in hint:
        assert "images here: here" in str(caught.value)


def test_an_image_put_there_by_hand_has_its_name(store: ImageStore) -> None:
    store.root.mkdir()
    (store.root / "mine.sif").write_text("image")
    assert [(stored.name, stored.key) for stored in store.list()] == [("mine", "")]
    store.remove("mine")
    assert store.list() == []


def test_errors_are_typed(store: ImageStore, tmp_path: Path) -> None:
    with pytest.raises(ImageNotFoundError, match="no built-in definition 'calc'; there are: base"):
        store.build("calc")
    with pytest.raises(ImageNotFoundError, match="cannot be read"):
        store.build("calc", tmp_path / "missing.def")
    with pytest.raises(ImageError, match="no reference"):
        store.pull("debian:12")
    with pytest.raises(ImageNotFoundError, match="no image 'calc'"):
        store.remove("calc")


@pytest.mark.anyio
async def test_async_twins_work_in_threads(store: ImageStore, definition: Path) -> None:
    built = await store.build_async("calc", definition, arguments={"A": "1"})
    pulled = await store.pull_async("docker://debian:12")
    assert [stored.name for stored in store.list()] == [built.name, pulled.name]
    assert (await store.inspect_async("calc")).missing == ("python3", "ipykernel")


def test_the_default_root_follows_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ImageStore().root == default_root() == tmp_path / "rollout-service" / "images"


def test_base_is_packaged_and_pins_what_the_lock_pins() -> None:
    assert "base" in packaged_names()
    text = packaged_definition("base").read_text()
    block = text.partition("<<REQUIREMENTS\n")[2].partition("\nREQUIREMENTS")[0]
    lock = (Path(__file__).parents[2] / "requirements.lock").read_text()
    locked = {line.split(" ", 1)[0] for line in lock.splitlines() if "==" in line}
    pins = block.split()
    assert len(pins) > 20
    assert set(pins) <= locked


def test_definitions_are_part_of_the_wheel() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert DEFINITIONS.parent.name in packages


@given(st.lists(st.text(), min_size=1), st.lists(st.text(), min_size=1))
def test_keys_are_equal_exactly_if_the_parts_are(first: list[str], second: list[str]) -> None:
    assert (_key(*first) == _key(*second)) == (first == second)


@given(st.text(min_size=1))
def test_names_of_references_are_names(text: str) -> None:
    name = _name_of(f"docker://x{text}")
    assert NAME.fullmatch(name)
