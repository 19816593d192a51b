"""Images by the real Apptainer: built from a small tree of the host's own shell, inspected, refused."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sandboxes.errors import ImageBuildError, ImageError
from sandboxes.host import find_apptainer, read_host_facts
from sandboxes.image_build import packaged_definition
from sandboxes.images import ImageStore

pytestmark = pytest.mark.apptainer

DEFINITION = """
Bootstrap: scratch

%arguments
    WHO=nobody

%setup
    cp -a "{tree}/." "$APPTAINER_ROOTFS/"
    echo "hello {{{{ WHO }}}}" >"$APPTAINER_ROOTFS/greeting"

%labels
    org.opencontainers.image.title tiny
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A root folder with bash, as bash and sh, and what it loads: 5 MB."""
    root = tmp_path / "tree"
    bash = Path(shutil.which("bash") or "/bin/bash").resolve()
    linked = subprocess.run(["ldd", bash], capture_output=True, text=True, check=True).stdout
    for source in [str(bash), *re.findall(r"(/\S+) \(0x", linked)]:
        target = root / source.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    (root / "bin").mkdir(exist_ok=True)
    for name in ("bash", "sh"):
        if not (root / "bin" / name).exists():
            (root / "bin" / name).symlink_to(bash)
    return root


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path / "images")


@pytest.fixture
def definition(tmp_path: Path, tree: Path) -> Path:
    path = tmp_path / "tiny.def"
    path.write_text(DEFINITION.format(tree=tree))
    return path


def read(image: Path, path: str) -> str:
    privileges = ["--no-privs"] if read_host_facts().needs_no_privs else []
    command = [find_apptainer(), "exec", *privileges, "--containall", image, "bash", "-c", f"echo $(<{path})"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_build_inspect_and_build_again(store: ImageStore, definition: Path) -> None:
    lines: list[str] = []
    built = store.build("tiny", definition, arguments={"WHO": "world"}, progress=lines.append)
    assert any("Build complete" in line for line in lines)
    assert read(store.resolve("tiny"), "/greeting") == "hello world"
    again: list[str] = []
    assert store.build("tiny", definition, arguments={"WHO": "world"}, progress=again.append) == built
    assert again == []

    found = store.inspect("tiny")
    assert found.bash
    assert (found.python, found.ipykernel) == (None, None)
    assert found.missing == ("python3", "ipykernel")
    assert found.labels["org.opencontainers.image.title"] == "tiny"
    assert found.size_bytes == built.size_bytes


def test_a_failed_build_says_why_and_leaves_nothing(store: ImageStore, tmp_path: Path) -> None:
    broken = tmp_path / "broken.def"
    broken.write_text("Bootstrap: scratch\n\n%setup\n    echo reason of the failure; exit 3\n")
    with pytest.raises(ImageBuildError, match="reason of the failure"):
        store.build("broken", broken)
    assert store.list() == []
    assert list((store.root / "blobs").iterdir()) == []


def test_a_registry_out_of_reach_is_a_typed_error(store: ImageStore) -> None:
    with pytest.raises(ImageBuildError) as caught:
        store.pull("docker://localhost:9/nothing:here")
    assert "registry cannot be reached" in caught.value.hint
    assert store.list() == []


def test_a_file_that_is_no_image_is_refused(store: ImageStore, tmp_path: Path) -> None:
    fake = tmp_path / "fake.sif"
    fake.write_text("not an image")
    with pytest.raises(ImageError, match=r"fake\.sif"):
        store.inspect(fake)


@pytest.mark.timeout(600)  # where it is not built yet
def test_the_base_image_has_what_the_sessions_need() -> None:
    store = ImageStore()
    store.build("base")
    found = store.inspect("base")
    assert found.missing == ()
    assert tuple(int(part) for part in (found.python or "").split(".")) >= (3, 11)
    assert f"ipykernel=={found.ipykernel}\n" in packaged_definition("base").read_text()
    assert found.size_bytes < 120e6
