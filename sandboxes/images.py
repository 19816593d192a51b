"""Named images: a folder that maps names to image files, safe for many processes at once.

Guarantees:
- A name's file is complete at every moment: an image appears, and is replaced, by one rename.
- An image is known by what it is made from (definition, arguments, builder): building it again is a look-up.
- Two builders of one image do the work once; a build that fails, or is killed, leaves the names as they were.

In the root, `NAME.sif` is a link to `blobs/KEY.sif`, and a blob that no name links to is removed. A sandbox that
runs keeps the image that it has mounted.
"""

import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio.to_thread

from sandboxes.errors import ImageError, ImageNotFoundError
from sandboxes.image_build import (
    ApptainerBuilder,
    ImageBuilder,
    ImageInfo,
    Progress,
    packaged_definition,
    packaged_names,
)

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
REFERENCE = re.compile(r"(docker|oras|library|https)://\S+")
SUFFIX = ".sif"


@dataclass(frozen=True, slots=True)
class StoredImage:
    """One name of the store."""

    name: str
    path: Path
    size_bytes: int
    built_at: float
    """Seconds since the epoch."""

    key: str
    """What it was made from, as a hash: equal keys are equal images."""


def default_root() -> Path:
    """`$XDG_CACHE_HOME/rollout-service/images`, by default below `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "rollout-service" / "images"


class ImageStore:
    """The images of one folder. Its methods block: the ones that take long have an `_async` twin."""

    def __init__(self, root: Path | None = None, builder: ImageBuilder | None = None) -> None:
        self.root = (root or default_root()).expanduser().absolute()
        self._blobs = self.root / "blobs"
        self._builder: ImageBuilder = builder or ApptainerBuilder()

    def resolve(self, image: str | os.PathLike[str]) -> Path:
        """The file (or unpacked folder) of a name, a path, or a reference that has been pulled.

        A path is what has a slash or ends in ".sif". Nothing is built or pulled: that may take minutes.

        Raises:
            ImageNotFoundError: there is none; the hint says the command that makes it.
        """
        text = os.fspath(image)
        if REFERENCE.fullmatch(text):
            path, hint = self._blob(self._pull_key(text)), f"rollout-service image pull {text}"
        elif "/" in text or text.endswith(SUFFIX):
            path, hint = Path(text).expanduser().absolute(), "name an image file or an unpacked image"
        else:
            path, hint = self._link(text), self._how_to_make(text)
        if path.exists():
            return path
        names = ", ".join(stored.name for stored in self.list()) or "none"
        raise ImageNotFoundError(f"there is no image {text!r}; images here: {names}", hint=hint)

    def build(
        self,
        name: str,
        definition: Path | None = None,
        *,
        arguments: Mapping[str, str] | None = None,
        force: bool = False,
        progress: Progress | None = None,
    ) -> StoredImage:
        """Build the image and give it the name; at once where the same has been built before.

        Args:
            name: what to call it.
            definition: a definition file; left out, the built-in one of this name.
            arguments: values for the definition's `%arguments`.
            force: build even if it is here, for example to take in newer packages.
            progress: called with each line of the builder, in this thread.

        Raises:
            ImageNotFoundError: there is no such definition.
            ImageBuildError: the build failed.
            ProviderUnavailableError: Apptainer is not installed.
        """
        definition = packaged_definition(name) if definition is None else definition.expanduser().absolute()
        chosen = dict(sorted((arguments or {}).items()))
        try:
            text = definition.read_text(encoding="utf-8")
        except OSError as error:
            raise ImageNotFoundError(f"the definition {definition} cannot be read: {error}") from error
        key = _key("build", self._builder.version, text, *(f"{k}={v}" for k, v in chosen.items()))
        say = progress or _silent

        def make(target: Path) -> None:
            self._builder.build(definition, target, chosen, say)

        return self._provide(name, key, make, force=force, say=say)

    def pull(
        self,
        reference: str,
        name: str | None = None,
        *,
        force: bool = False,
        progress: Progress | None = None,
    ) -> StoredImage:
        """Pull an image such as "docker://python:3.12-slim"; its name is made from the reference by default.

        Raises:
            ImageError: this is no reference.
            ImageBuildError: the registry cannot be reached, refuses, or has no such image.
            ProviderUnavailableError: Apptainer is not installed.
        """
        if not REFERENCE.fullmatch(reference):
            raise ImageError(f"{reference!r} is no reference", hint="write it as docker://NAME:TAG")
        say = progress or _silent

        def make(target: Path) -> None:
            self._builder.pull(reference, target, say)

        key = self._pull_key(reference)
        return self._provide(name or _name_of(reference), key, make, force=force, say=say)

    def inspect(self, image: str | os.PathLike[str]) -> ImageInfo:
        """What the image offers and lacks; it is started once for that (about half a second).

        Raises:
            ImageNotFoundError: there is no such image.
            ImageError: it cannot be read or started.
            ProviderUnavailableError: Apptainer is not installed.
        """
        return self._builder.inspect(self.resolve(image))

    def list(self) -> list[StoredImage]:
        """All names, sorted."""
        links = sorted(path for path in self.root.glob(f"*{SUFFIX}") if path.exists())
        return [self._stored(path.name.removesuffix(SUFFIX)) for path in links]

    def remove(self, name: str) -> None:
        """Forget the name, and its image where no other name has the same.

        Raises:
            ImageNotFoundError: there is no such name.
        """
        link = self._link(name)
        with self._lock("store"):
            if not link.is_symlink() and not link.exists():
                raise ImageNotFoundError(f"there is no image {name!r}")
            link.unlink()
            self._collect()

    async def build_async(
        self,
        name: str,
        definition: Path | None = None,
        *,
        arguments: Mapping[str, str] | None = None,
        force: bool = False,
        progress: Progress | None = None,
    ) -> StoredImage:
        """`build` in a thread; `progress` is called in that thread. Cancelling does not stop the builder."""
        work = partial(self.build, name, definition, arguments=arguments, force=force, progress=progress)
        return await anyio.to_thread.run_sync(work)

    async def pull_async(
        self,
        reference: str,
        name: str | None = None,
        *,
        force: bool = False,
        progress: Progress | None = None,
    ) -> StoredImage:
        """`pull` in a thread; `progress` is called in that thread. Cancelling does not stop the builder."""
        work = partial(self.pull, reference, name, force=force, progress=progress)
        return await anyio.to_thread.run_sync(work)

    async def inspect_async(self, image: str | os.PathLike[str]) -> ImageInfo:
        """`inspect` in a thread."""
        return await anyio.to_thread.run_sync(self.inspect, image)

    def _provide(
        self, name: str, key: str, make: Callable[[Path], None], *, force: bool, say: Progress
    ) -> StoredImage:
        link, blob = self._link(name), self._blob(key)
        unfinished = self._blobs / f"{key}.partial"
        with self._lock(key, waiting=lambda: say("waiting for another build of the same image")):
            # What is there was left by a builder that was killed: an alive one would hold the lock.
            shutil.rmtree(unfinished, ignore_errors=True)
            if force or not blob.exists():
                unfinished.mkdir()
                try:
                    make(unfinished / blob.name)
                    (unfinished / blob.name).replace(blob)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
            with self._lock("store"):
                _link_atomically(link, blob)
                self._collect()
        return self._stored(name)

    def _collect(self) -> None:
        """Remove what no name links to and what killed builders left; not what a build holds the lock of."""
        used = {path.resolve() for path in self.root.glob(f"*{SUFFIX}")}
        for path in self._blobs.glob("*"):
            if path.resolve() in used:
                continue
            with suppress(BlockingIOError), self._lock(path.stem, wait=False):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    @contextmanager
    def _lock(
        self, name: str, *, wait: bool = True, waiting: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Hold a lock between processes and threads, which the kernel releases when its holder dies.

        Raises:
            BlockingIOError: it is held, and `wait` is false.
        """
        locks = self.root / "locks"
        for folder in (locks, self._blobs):
            folder.mkdir(parents=True, exist_ok=True)
        with (locks / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _stored(self, name: str) -> StoredImage:
        link = self._link(name)
        status = link.stat()
        return StoredImage(
            name=name,
            path=link,
            size_bytes=status.st_size,
            built_at=status.st_mtime,
            key=link.resolve().stem if link.is_symlink() else "",
        )

    def _link(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise ImageNotFoundError(
                f"{name!r} is no name of an image",
                hint="a name has small letters, digits, dots, dashes and underscores",
            )
        return self.root / f"{name}{SUFFIX}"

    def _blob(self, key: str) -> Path:
        return self._blobs / f"{key}{SUFFIX}"

    def _pull_key(self, reference: str) -> str:
        return _key("pull", self._builder.version, reference)

    def _how_to_make(self, name: str) -> str:
        if name in packaged_names():
            return f"rollout-service image build {name}"
        return f"rollout-service image build {name} --definition FILE, or name a file or docker://{name}"


def _silent(_line: str) -> None:
    """Progress that nobody asked for."""


def _key(*parts: str) -> str:
    """A hash of the parts that no other parts have: each is preceded by its length."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:32]


def _name_of(reference: str) -> str:
    """ "docker://ghcr.io/org/python:3.12" -> "ghcr.io-org-python-3.12", cut to what a name may be."""
    text = re.sub(r"[^a-z0-9._]+", "-", reference.split("://", 1)[1].lower())
    return text.strip("-._")[-64:].lstrip("-._")


def _link_atomically(link: Path, target: Path) -> None:
    fresh = link.with_name(f".{link.name}.{os.getpid()}.{threading.get_ident()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.relative_to(link.parent))
    fresh.replace(link)
