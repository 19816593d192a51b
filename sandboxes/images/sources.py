"""Sources of images: a definition, a Dockerfile, a reference to an image made elsewhere, or a root file system.

A source's identity makes a second build a look-up.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import ClassVar, Literal

from sandboxes.errors import ImageError, ImageNotFoundError
from sandboxes.image_names import SCHEMES
from sandboxes.images.archives import read_archive
from sandboxes.images.dockerfile.context import BuildContext, digest
from sandboxes.images.dockerfile.parser import parse
from sandboxes.images.dockerfile.plan import BuildPlan, copied_sources, make_plan

DEFINITIONS = Path(str(files("sandboxes") / "definitions"))
"""A file's stem is the image's name."""

REFERENCE = re.compile(rf"(?:({SCHEMES})://|(oci|oci-archive|docker-archive):)(\S+)")
CREDENTIALS = re.compile(r"\w+://[^/@]*:[^/@]*@(?!sha\d+:)")
MOST_BYTES = 1024 * 1024
"""Of a definition or a Dockerfile."""
NAME_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Definition:
    path: Path
    arguments: Mapping[str, str] = field(default_factory=dict)
    begin: Path | None = field(default=None, compare=False)
    kind: ClassVar[str] = "definition"

    def __str__(self) -> str:
        return str(self.path)

    def identity(self) -> tuple[str, ...]:
        """Leave out files that the definition copies in.

        Raises:
            ImageNotFoundError: The definition cannot be read.
        """
        text = _read(self.path, "the definition", hint="name an Apptainer definition file")
        return text, *(f"{name}={value}" for name, value in sorted(self.arguments.items()))

    def flags(self) -> list[str]:
        return [f"--build-arg={name}={value}" for name, value in sorted(self.arguments.items())]


@dataclass(frozen=True, slots=True)
class Reference:
    """An image in a registry, such as docker://python:3.12-slim, or in a file, such as oci-archive:python.tar."""

    text: str
    https: bool = True
    kind: ClassVar[str] = "reference"

    def __str__(self) -> str:
        return self.text

    @property
    def local(self) -> Path | None:
        found = REFERENCE.fullmatch(self.text)
        return Path(found[3]) if found and found[2] else None

    def identity(self) -> tuple[str, ...]:
        """Return a file's state, too. A tag that changes in a registry is not noticed.

        Raises:
            ImageError: The text is not a reference, or has a password in it.
            ImageNotFoundError: There is no such file.
        """
        if not REFERENCE.fullmatch(self.text):
            raise ImageError(
                f"{self.text!r} is not a reference", hint="write it as docker://NAME:TAG, or oci-archive:FILE"
            )
        if CREDENTIALS.match(self.text):
            raise ImageError(
                "the reference contains a password, but references are stored and shown",
                hint="log in with `apptainer registry login`, or set APPTAINER_DOCKER_USERNAME and _PASSWORD",
            )
        if self.local is None:
            return (self.text,)
        try:
            # An OCI layout is identified by its index, whatever else is in the folder.
            index = self.local / "index.json"
            found = (index if index.exists() else self.local).stat()
        except OSError as error:
            raise ImageNotFoundError(
                f"cannot read {self.local}: {error.strerror}", hint="name a file, without a tag after it"
            ) from error
        return self.text, f"{found.st_size} {found.st_mtime_ns}"

    def flags(self) -> list[str]:
        return [] if self.https else ["--no-https"]


@dataclass(frozen=True, slots=True)
class ArchiveSource:
    path: Path
    tag: str | None = None
    kind: ClassVar[str] = "archive"

    def __str__(self) -> str:
        return f"{self.path}" + (f" ({self.tag})" if self.tag else "")

    def identity(self) -> tuple[str, ...]:
        """
        Raises:
            ImageNotFoundError: There is no such file, or no such image in it.
            ImageError: It is not an archive of images.
        """
        number = read_archive(self.path).number_of(self.tag)
        found = self.path.stat()
        return str(self.path), f"{found.st_size} {found.st_mtime_ns}", str(number)


@dataclass(frozen=True, slots=True)
class Tree:
    path: Path
    kind: ClassVar[str] = "tree"

    def __str__(self) -> str:
        return str(self.path)

    def identity(self) -> tuple[str, ...]:
        """Hash names, sizes, modes and times, but no contents.

        Raises:
            ImageNotFoundError: The path is not a folder.
            ImageError: The folder has no bash, so it is hardly a root file system.
        """
        if not self.path.is_dir():
            raise ImageNotFoundError(f"{self.path} is not a folder", hint="name the root of a file system")
        if not any(os.path.lexists(self.path / place) for place in ("bin/bash", "usr/bin/bash")):
            raise ImageError(f"{self.path} has no /bin/bash", hint="name the root of a file system that contains bash")
        digest = hashlib.sha256()
        for folder, folders, names in os.walk(self.path):
            folders.sort()
            for name in sorted(names + folders):
                path = os.path.join(folder, name)  # noqa: PTH118  this runs for every file
                status = os.lstat(path)
                times = "" if os.path.isdir(path) else f"{status.st_size} {status.st_mtime_ns}"  # noqa: PTH112
                inside = os.path.relpath(path, self.path)
                owner = f"{status.st_uid}:{status.st_gid}"
                digest.update(f"{inside}\0{status.st_mode} {owner} {times}\0".encode(errors="surrogateescape"))
        return str(self.path), digest.hexdigest()

    def flags(self) -> list[str]:
        return []


@dataclass(frozen=True, slots=True)
class DockerfileSource:
    """Everything that a build depends on; `dockerfiles.find_bases` finds the bases."""

    path: Path
    context: Path
    bases: Mapping[str, Path] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None
    network: Literal["host", "none"] = "host"
    max_bytes: int | None = None
    """Limits the image's disk use."""

    cached: bool = True
    kind: ClassVar[str] = "Dockerfile"

    def __str__(self) -> str:
        return str(self.path)

    def plan(self) -> BuildPlan:
        """
        Raises:
            ImageNotFoundError: The file cannot be read.
            DockerfileError: It asks for something unsupported.
        """
        text = _read(self.path, "the Dockerfile", hint="name a Dockerfile, or its folder")
        return make_plan(parse(text, self.path.name), self.arguments, self.target)

    def identity(self) -> tuple[str, ...]:
        """Include the states of the bases, and a hash of the files that it copies.

        Raises:
            ImageNotFoundError: The file, the context, a base, or a file that is copied does not exist.
            DockerfileError: The file asks for something unsupported.
        """
        plan = self.plan()
        context = BuildContext(self.context, self.path)
        copied = context.select(sources) if (sources := copied_sources(plan)) else []
        return (
            self.path.read_text(encoding="utf-8"),
            *(f"{name}={value}" for name, value in sorted(self.arguments.items())),
            f"target {plan.target.name} network {self.network}",
            *(f"base {name} {_state(path)}" for name, path in sorted(self.bases.items())),
            digest(copied),
        )


def _read(path: Path, what: str, *, hint: str) -> str:
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ImageNotFoundError(
                f"{what} {path} has {size} bytes, more than {MOST_BYTES}", hint="copy long texts from files"
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ImageNotFoundError(f"cannot read {what} {path}: {error}", hint=hint) from error


def _state(path: Path) -> str:
    try:
        found = path.resolve().stat()
    except OSError as error:
        raise ImageNotFoundError(f"cannot read the base {path}: {error.strerror}") from error
    return f"{path.resolve()} {found.st_size} {found.st_mtime_ns}"


Source = Definition | Reference | ArchiveSource | Tree | DockerfileSource


def source_of_reference(text: str, *, https: bool = True) -> Reference:
    found = REFERENCE.fullmatch(text)
    if found and found[2]:
        text = f"{found[2]}:{Path(found[3]).expanduser().absolute()}"
    return Reference(text, https)


def packaged(name: str, arguments: Mapping[str, str] | None = None) -> Definition:
    """
    Raises:
        ImageNotFoundError: The package has no such definition.
    """
    path = DEFINITIONS / f"{name}.def"
    if path.is_file():
        return Definition(path, arguments or {})
    known = ", ".join(packaged_names())
    raise ImageNotFoundError(
        f"there is no built-in definition {name!r}; built in are: {known}", hint="name a definition file"
    )


def packaged_names() -> list[str]:
    return sorted(path.stem for path in DEFINITIONS.glob("*.def"))


def name_of_reference(text: str) -> str:
    """Turn "docker://ghcr.io/org/python:3.12" into "ghcr.io-org-python-3.12"."""
    found = REFERENCE.fullmatch(text)
    rest = text if found is None else Path(found[3]).stem if found[2] else found[3]
    name = re.sub(r"[^a-z0-9._]+", "-", rest.lower())
    return name.strip("-._")[-NAME_LENGTH:].lstrip("-._") or "image"
