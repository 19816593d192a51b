"""What an image is made from: a definition, a reference to one made elsewhere, or a folder with a root file system.

A source knows its identity, so that making an image from it again is a look-up, and how Apptainer is told of it.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from sandboxes.errors import ImageError, ImageNotFoundError

DEFINITIONS = Path(str(files("sandboxes") / "definitions"))
"""The definitions that this package brings; the file's stem is the image's name."""

REFERENCE = re.compile(r"(?:(docker|oras|library|https)://|(oci|oci-archive|docker-archive):)(\S+)")
CREDENTIALS = re.compile(r"\w+://[^/@]*:[^/@]*@(?!sha\d+:)")
NAME_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Definition:
    """A definition file of Apptainer's, with values for its `%arguments`."""

    path: Path
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """For people."""
        return "definition"

    def __str__(self) -> str:
        return str(self.path)

    def identity(self) -> tuple[str, ...]:
        """The text and the arguments; files that the definition copies in are not looked at.

        Raises:
            ImageNotFoundError: it cannot be read.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ImageNotFoundError(
                f"the definition {self.path} cannot be read: {error}",
                hint="name an Apptainer definition file",
            ) from error
        return text, *(f"{name}={value}" for name, value in sorted(self.arguments.items()))

    def flags(self) -> list[str]:
        """The flags of `apptainer build`."""
        return [f"--build-arg={name}={value}" for name, value in sorted(self.arguments.items())]


@dataclass(frozen=True, slots=True)
class Reference:
    """An image of a registry, such as docker://python:3.12-slim, or of a file, such as oci-archive:python.tar."""

    text: str
    https: bool = True
    """False lets a registry be asked without encryption."""

    @property
    def kind(self) -> str:
        """For people."""
        return "reference"

    def __str__(self) -> str:
        return self.text

    @property
    def local(self) -> Path | None:
        """The file or folder, for a reference that needs no registry."""
        found = REFERENCE.fullmatch(self.text)
        return Path(found[3]) if found and found[2] else None

    def identity(self) -> tuple[str, ...]:
        """The reference; for a file its state, too. What a registry has by a tag may change: that is not seen.

        Raises:
            ImageError: it is not a reference, or has a password in it.
            ImageNotFoundError: there is no such file.
        """
        if not REFERENCE.fullmatch(self.text):
            raise ImageError(
                f"{self.text!r} is not a reference", hint="write it as docker://NAME:TAG, or oci-archive:FILE"
            )
        if CREDENTIALS.match(self.text):
            raise ImageError(
                "a reference holds no password, since it is stored and shown",
                hint="log in with `apptainer registry login`, or set APPTAINER_DOCKER_USERNAME and _PASSWORD",
            )
        if self.local is None:
            return (self.text,)
        try:
            # What makes an OCI layout another is its index, whatever else lies in the folder.
            index = self.local / "index.json"
            found = (index if index.exists() else self.local).stat()
        except OSError as error:
            raise ImageNotFoundError(
                f"{self.local} cannot be read: {error.strerror}", hint="name a file, without a tag after it"
            ) from error
        return self.text, f"{found.st_size} {found.st_mtime_ns}"

    def flags(self) -> list[str]:
        """The flags of `apptainer build`."""
        return [] if self.https else ["--no-https"]


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder with a root file system, such as debootstrap makes."""

    path: Path

    @property
    def kind(self) -> str:
        """For people."""
        return "tree"

    def __str__(self) -> str:
        return str(self.path)

    def identity(self) -> tuple[str, ...]:
        """The names, sizes, modes and times of all files, as a hash: not what is in them.

        Raises:
            ImageNotFoundError: it is not a folder.
            ImageError: it has no bash, so that it is hardly a root file system.
        """
        if not self.path.is_dir():
            raise ImageNotFoundError(f"{self.path} is not a folder", hint="name the root of a file system")
        if not any(os.path.lexists(self.path / place) for place in ("bin/bash", "usr/bin/bash")):
            raise ImageError(
                f"{self.path} has no /bin/bash", hint="name the root of a file system that has bash"
            )
        digest = hashlib.sha256()
        for folder, folders, names in os.walk(self.path):
            folders.sort()
            for name in sorted(names + folders):
                path = os.path.join(folder, name)  # noqa: PTH118  this runs for every file
                status = os.lstat(path)
                times = "" if os.path.isdir(path) else f"{status.st_size} {status.st_mtime_ns}"  # noqa: PTH112
                inside = os.path.relpath(path, self.path)
                owner = f"{status.st_uid}:{status.st_gid}"
                digest.update(
                    f"{inside}\0{status.st_mode} {owner} {times}\0".encode(errors="surrogateescape")
                )
        return str(self.path), digest.hexdigest()

    def flags(self) -> list[str]:
        """The flags of `apptainer build`."""
        return []


Source = Definition | Reference | Tree


def source_of_reference(text: str, *, https: bool = True) -> Reference:
    """A reference whose file, if it names one, is absolute."""
    found = REFERENCE.fullmatch(text)
    if found and found[2]:
        text = f"{found[2]}:{Path(found[3]).expanduser().absolute()}"
    return Reference(text, https)


def packaged_definition(name: str) -> Path:
    """The definition that this package brings for `name`.

    Raises:
        ImageNotFoundError: it brings none.
    """
    path = DEFINITIONS / f"{name}.def"
    if path.is_file():
        return path
    known = ", ".join(packaged_names())
    raise ImageNotFoundError(
        f"there is no built-in definition {name!r}; there are: {known}", hint="name a definition file"
    )


def packaged_names() -> list[str]:
    """The images that this package can build, by name."""
    return sorted(path.stem for path in DEFINITIONS.glob("*.def"))


def name_of_reference(text: str) -> str:
    """ "docker://ghcr.io/org/python:3.12" -> "ghcr.io-org-python-3.12", cut to what a name may be."""
    found = REFERENCE.fullmatch(text)
    rest = text if found is None else Path(found[3]).stem if found[2] else found[3]
    name = re.sub(r"[^a-z0-9._]+", "-", rest.lower())
    return name.strip("-._")[-NAME_LENGTH:].lstrip("-._") or "image"
