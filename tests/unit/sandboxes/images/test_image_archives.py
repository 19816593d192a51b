"""Archives of images are told apart by what is in them."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from sandboxes.errors import ImageError, ImageNotFoundError
from sandboxes.images.archives import read_archive, single_image

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
