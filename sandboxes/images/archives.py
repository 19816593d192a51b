"""Archives of images: OCI image layouts, and the output of `docker save`; told apart by their contents.

Apptainer takes no tag for a part of an archive, refuses names that begin with "./", and unpacks no compressed archive
of the OCI's kind. Such an image is copied into an archive of its own.
"""

import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sandboxes.errors import ImageError, ImageNotFoundError

INDEX, LAYOUT, MANIFEST, REPOSITORIES = "index.json", "oci-layout", "manifest.json", "repositories"
REF_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
MALFORMED = (AttributeError, IndexError, KeyError, RecursionError, TypeError)
"""Raised where documents of another form than theirs are read."""
BROKEN = (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError, ValueError, *MALFORMED)

DOCUMENT_LIMIT = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ImageArchive:
    path: Path
    kind: Literal["oci-archive", "docker-archive"]
    images: tuple[tuple[str, ...], ...]
    """The tags of each image, in the archive's order; none for an image without a tag."""

    plain: bool

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(tag for tags in self.images for tag in tags)

    def number_of(self, tag: str | None) -> int:
        """
        Raises:
            ImageNotFoundError: No image has the tag, or there are many and no tag was given.
        """
        if tag is None and len(self.images) == 1:
            return 0
        for number, tags in enumerate(self.images):
            if tag is not None and any(tag in {found, found.rpartition("/")[2]} for found in tags):
                return number
        known = ", ".join(self.tags) or "none"
        what = f"no image {tag!r}" if tag is not None else f"{len(self.images)} images"
        raise ImageNotFoundError(f"{self.path} has {what}", hint=f"choose one with --tag; its tags are: {known}")


def read_archive(path: Path) -> ImageArchive:
    """
    Raises:
        ImageNotFoundError: There is no such file.
        ImageError: It is not an archive of images.
    """
    try:
        found = _read(path)
    except FileNotFoundError as error:
        raise ImageNotFoundError(f"there is no {path}", hint="name an archive of images") from error
    except BROKEN as error:
        raise ImageError(f"cannot read the archive {path}: {error}", hint="name an archive of images") from error
    if found is None:
        raise ImageError(
            f"{path} is not an archive of images: it has neither {INDEX} nor {MANIFEST}",
            hint="`docker save` and `skopeo copy ... oci-archive:FILE` write such archives; "
            "a root file system is a --tree",
        )
    return found


def _read(path: Path) -> ImageArchive | None:
    documents: dict[str, Any] = {}
    with tarfile.open(path) as archive:
        plain = not _is_compressed(path)
        for member in archive:
            name = member.name.removeprefix("./")
            plain = plain and not member.name.startswith("./")
            if name in {INDEX, LAYOUT, MANIFEST} and member.isreg() and member.size < DOCUMENT_LIMIT:
                file = archive.extractfile(member)
                documents[name] = json.loads(file.read()) if file is not None else None
    # `docker save` writes both kinds into one file since version 25.
    if isinstance(documents.get(MANIFEST), list) and documents[MANIFEST]:
        images = tuple(tuple(map(str, entry.get("RepoTags") or ())) for entry in documents[MANIFEST])
        return ImageArchive(path, "docker-archive", images, plain)
    if isinstance(documents.get(INDEX), dict) and documents[INDEX].get("manifests"):
        images = tuple(tuple(_names(entry)) for entry in documents[INDEX]["manifests"])
        return ImageArchive(path, "oci-archive", images, plain)
    return None


def single_image(archive: ImageArchive, tag: str | None, folder: Path) -> Path:
    """Return an archive that Apptainer reads and that has only the chosen image: itself, or a copy in `folder`.

    Raises:
        ImageNotFoundError: No image has the tag.
        ImageError: The archive cannot be read to its end.
    """
    number = archive.number_of(tag)
    if archive.plain and len(archive.images) == 1:
        return archive.path
    document = INDEX if archive.kind == "oci-archive" else MANIFEST
    target = folder / "image.tar"
    try:
        with tarfile.open(archive.path) as source, tarfile.open(target, "w") as copy:
            for member in source:
                member.name = member.name.removeprefix("./")
                if member.islnk() or member.issym():
                    member.linkname = member.linkname.removeprefix("./")
                if member.name in {"", ".", REPOSITORIES} or member.name in {INDEX, MANIFEST} - {document}:
                    continue
                file = source.extractfile(member) if member.isreg() else None
                if member.name == document and file is not None:
                    data = _only(document, json.loads(file.read()), number)
                    member.size, file = len(data), io.BytesIO(data)
                copy.addfile(member, file)
    except BROKEN as error:
        raise ImageError(f"cannot read the archive {archive.path}: {error}") from error
    return target


def _only(document: str, found: Any, number: int) -> bytes:
    if document == MANIFEST:
        return json.dumps([found[number]]).encode()
    return json.dumps(found | {"manifests": [found["manifests"][number]]}).encode()


def _names(entry: dict[str, Any]) -> Iterable[str]:
    annotations = entry.get("annotations") or {}
    return dict.fromkeys(str(annotations[name]) for name in REF_NAMES if name in annotations)


def _is_compressed(path: Path) -> bool:
    try:
        with tarfile.open(path, "r:"):
            return False
    except tarfile.TarError:
        return True
