"""The real Apptainer builds images from definitions, archives, a registry and folders."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollout_service.cli import app
from sandboxes import ApptainerConfig, make_provider
from sandboxes.errors import ImageBuildError, ImageNotFoundError
from sandboxes.host.facts import find_apptainer
from sandboxes.images.sources import (
    ArchiveSource,
    Definition,
    Reference,
    Tree,
    packaged,
    source_of_reference,
)
from sandboxes.images.store import ImageStore
from sandboxes.images.unpacked import UnpackedImages
from sandboxes.providers.apptainer.provider import ApptainerProvider
from tests.support.images.oci import make_layout, registry
from tests.support.processes.children import killed

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
    """Create a root folder with bash, as bash and sh, and the libraries that it loads: 5 MB."""
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
    privileges = ["--no-privs"] if os.geteuid() == 0 else []
    command = [find_apptainer(), "exec", *privileges, "--containall", image, "bash", "-c", f"echo $(<{path})"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def unpacked(tmp_path: Path) -> UnpackedImages:
    config = ApptainerConfig(unpacked_dir=tmp_path / "unpacked")
    provider = make_provider(config, tmp_path / "state", tmp_path / "images")
    assert isinstance(provider, ApptainerProvider)
    return provider.prepared_images.unpacked


def test_build_inspect_and_build_again(store, unpacked, definition):
    lines: list[str] = []
    source = Definition(definition, {"WHO": "world"})
    built = store.provide(source, progress=lines.append)
    assert any("Build complete" in line for line in lines)
    assert read(store.resolve("tiny"), "/greeting") == "hello world"
    again: list[str] = []
    assert store.provide(source, progress=again.append) == built
    assert again == []

    found = unpacked.facts(store.resolve("tiny"))
    assert found.bash
    assert (found.python, found.ipykernel, found.needs_toolkit) == (None, None, True)
    assert "tar" in found.missing
    assert found.labels["org.opencontainers.image.title"] == "tiny"


def test_a_failed_build_says_why_and_leaves_nothing(store, tmp_path):
    broken = tmp_path / "broken.def"
    broken.write_text("Bootstrap: scratch\n\n%setup\n    echo reason of the failure; exit 3\n")
    with pytest.raises(ImageBuildError, match="reason of the failure"):
        store.provide(Definition(broken))
    assert store.list() == []
    assert list((store.root / "blobs").iterdir()) == []
    assert list((store.root / "drafts").iterdir()) == []


def test_an_unreachable_registry_is_a_typed_error(store):
    with pytest.raises(ImageBuildError) as caught:
        store.provide(Reference("docker://localhost:9/nothing:here"))
    assert "registry cannot be reached" in caught.value.hint
    assert store.list() == []


def test_an_image_of_a_tree(store, tree):
    (tree / "greeting").write_text("from a tree")
    assert store.provide(Tree(tree)).name == "tree"
    assert read(store.resolve("tree"), "/greeting") == "from a tree"


def test_images_of_archives_and_layouts(store, unpacked, tree, tmp_path):
    (tree / "greeting").write_text("from a layout")
    (tree / "etc").mkdir()
    (tree / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\napp:x:7:7::/home/app:/bin/sh\n")
    variables = {"PATH": "/opt/bin:/bin", "API_TOKEN": "hush"}
    layout = make_layout(tree, tmp_path / "layout", variables, WorkingDir="/app/", User="7:7")
    archive = tmp_path / "archive.tar"
    with tarfile.open(archive, "w") as tar:
        for path in layout.iterdir():
            tar.add(path, path.name)
    for text in (f"oci:{layout}", f"oci-archive:{archive}"):
        made = store.provide(source_of_reference(text))
        assert read(made.path, "/greeting") == "from a layout"
        assert store.resolve(text).samefile(made.path)
        facts = unpacked.facts(made.path)
        assert facts.environment == {"PATH": "/opt/bin:/bin"}
        assert (facts.workdir, facts.user, facts.home) == ("/app", "app", "/home/app")


def test_one_of_many_images_of_an_archive_is_imported(store, tree, tmp_path, monkeypatch):
    manifests = []
    for name in ("one", "two"):
        (tree / "greeting").write_text(f"from {name}")
        layout = make_layout(tree, tmp_path / "layout" if name == "one" else tmp_path / "more", {})
        (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
        manifests.append(entry | {"annotations": {"org.opencontainers.image.ref.name": f"team/{name}:1"}})
    shutil.copytree(tmp_path / "more/blobs", tmp_path / "layout/blobs", dirs_exist_ok=True)
    (tmp_path / "layout/index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
    file = tmp_path / "many.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        tar.add(tmp_path / "layout", ".")
    monkeypatch.setenv("ROLLOUT_IMAGES_DIR", str(store.root))
    done = CliRunner().invoke(app, ["image", "import", str(file), "--tag", "two:1", "--json"])
    assert done.exit_code == 0, done.output
    assert [one["name"] for one in json.loads(done.stdout)] == ["two-1"]
    assert read(store.resolve("two-1"), "/greeting") == "from two"
    refused = CliRunner().invoke(app, ["image", "import", str(file)])
    assert refused.exit_code == 1
    assert "has 2 images" in refused.stderr
    assert "team/one:1, team/two:1" in refused.stderr


def test_what_docker_saved_is_imported(store, tree, tmp_path):
    (tree / "greeting").write_text("saved")
    layout = make_layout(tree, tmp_path / "layout", {})
    blobs = layout / "blobs/sha256"
    (entry,) = json.loads((layout / "index.json").read_text())["manifests"]
    manifest = json.loads((blobs / entry["digest"].removeprefix("sha256:")).read_text())
    at = {"Config": manifest["config"]["digest"], "Layers": manifest["layers"][0]["digest"]}
    paths = {key: f"blobs/sha256/{value.removeprefix('sha256:')}" for key, value in at.items()}
    saved = [{"Config": paths["Config"], "RepoTags": ["tiny:1"], "Layers": [paths["Layers"]]}]
    (layout / "manifest.json").write_text(json.dumps(saved))
    file = tmp_path / "saved.tar"
    with tarfile.open(file, "w") as tar:
        for path in layout.iterdir():
            tar.add(path, path.name)
    made = store.provide(ArchiveSource(file))
    assert (made.name, made.pulled) == ("saved", False)
    assert read(made.path, "/greeting") == "saved"
    with pytest.raises(ImageNotFoundError, match="no image 'other'"):
        store.provide(ArchiveSource(file, "other"))


def test_a_registry_is_pulled_from(store, tree, tmp_path):
    (tree / "greeting").write_text("from a registry")
    with registry(make_layout(tree, tmp_path / "layout", {})) as address:
        reference = Reference(f"docker://{address}/team/tiny:1", https=False)
        made = store.provide(reference, "tiny")
        assert (made.pulled, made.source) == (True, reference.text)
        with pytest.raises(ImageBuildError) as caught:
            store.provide(Reference(f"docker://{address}/team/none:1", https=False))
        assert "no such image" in caught.value.hint
    assert store.provide(reference, "again").key == made.key, "without the registry"
    assert read(store.resolve(reference.text), "/greeting") == "from a registry"


def test_a_password_opens_a_registry_and_is_seen_nowhere(store, tree, tmp_path, monkeypatch):
    lines: list[str] = []
    layout = make_layout(tree, tmp_path / "layout", {})
    with registry(layout, user="me", password="hush-hush") as address:
        reference = Reference(f"docker://{address}/team/tiny:1", https=False)
        with pytest.raises(ImageBuildError) as caught:
            store.provide(reference, "tiny", progress=lines.append)
        assert "registry login" in caught.value.hint
        monkeypatch.setenv("APPTAINER_DOCKER_USERNAME", "me")
        monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "hush-hush")
        made = store.provide(reference, "tiny", progress=lines.append)
    assert "hush-hush" not in "".join(lines)
    assert b"hush-hush" not in made.path.read_bytes()
    found = subprocess.run(["grep", "-rlF", "hush-hush", store.root], capture_output=True, check=False)
    assert found.stdout == b""


PULLER = """
import sys
from pathlib import Path
from typing import Any
from sandboxes.images.sources import Tree
from sandboxes.images.store import ImageStore
print("begun", flush=True)
while True:
    ImageStore(Path(sys.argv[1])).provide(Tree(Path(sys.argv[2])), "tree", force=True)
"""


def test_a_real_build_that_is_killed_leaves_a_store_that_works(store, tree, tmp_path, monkeypatch):
    (tree / "greeting").write_text("whole")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("APPTAINER_TMPDIR", str(scratch))
    for moment in (0.1, 0.3):
        started = subprocess.Popen(
            [sys.executable, "-c", PULLER, store.root, tree],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with killed(started) as builder:
            assert builder.stdout.readline() == b"begun\n"
            time.sleep(moment)  # any moment will do
    made = store.provide(Tree(tree), force=True)
    assert read(made.path, "/greeting") == "whole"
    assert list((store.root / "drafts").iterdir()) == []
    assert [path for path in scratch.glob("*/drafts/*") if "build~" in path.name] == []


@pytest.mark.timeout(600)  # the image may have to be built
def test_the_base_image_has_what_the_sessions_need(unpacked):
    store = ImageStore()
    store.provide(packaged("base"), "base")
    found = unpacked.facts(store.resolve("base"))
    assert (found.missing, found.needs_toolkit) == ((), False)
    assert tuple(int(part) for part in (found.python_version or "").split(".")) >= (3, 11)
    assert f"ipykernel=={found.ipykernel} " in packaged("base").path.read_text()
    assert store.resolve("base").stat().st_size < 120e6


def test_the_command_line_makes_shows_and_prunes(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def image(*arguments: str, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["image", *arguments])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout) if "--json" in arguments else result.stderr

    (made,) = image("build", "mine", "--tree", str(tree), "--json")
    assert image("list", "--json") == [made]
    os.utime(made["path"], (0, 0))
    assert "mine is unchanged; pass --force to make it again" in image("build", "mine", "--tree", str(tree))
    (made,) = image("list", "--json")
    facts = image("inspect", "mine", "--json", code=1)
    assert (facts["needs_toolkit"], facts["python"]) == (True, None)
    assert "tar" in facts["missing"]
    dry = image("prune", "--budget-gb", "0", "--idle-hours", "0", "--dry-run", "--json")
    assert [one["evicted"] for one in dry["decided"]] == [True]
    assert [one["evicted"] for one in image("prune", "--budget-gb", "0", "--json")["decided"]] == [False]
    assert image("list", "--json") == [made]
    image("prune", "--budget-gb", "0", "--idle-hours", "0")
    assert image("list", "--json") == []
    said = image("build", "mine", "--tree", str(tree), "--arg", "A=1", code=1)
    assert "--tree cannot be combined with --definition or --arg" in said
