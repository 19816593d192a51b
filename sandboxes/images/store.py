"""Named images: a folder that maps names to image files, safe for many processes on many nodes at once.

Guarantees:
- A name's file is complete at every moment: an image appears, and is replaced, by one rename.
- An image is identified by its inputs (source, arguments, builder), so making it again is a look-up.
- A builder that fails, or is killed at any moment, leaves the names as they were.
- No file is removed that another node has used within the grace period: it may have it mounted.

`NAME.sif` is a link to `blobs/KEY.sif`. `blobs/KEY.json` says where that came from, and `uses/` which node used which
image and when. Only `remove` and `prune` remove names.
"""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from sandboxes.config import default_cache
from sandboxes.errors import ImageBuildError, ImageError, ImageNotFoundError
from sandboxes.images.build import ApptainerBuilder, Progress
from sandboxes.images.eviction import EvictionCandidate, evict, why_recent
from sandboxes.images.shared_folder import SharedFolder, modified
from sandboxes.images.sources import (
    REFERENCE,
    ArchiveSource,
    Definition,
    DockerfileSource,
    Source,
    Tree,
    name_of_reference,
    packaged_names,
    source_of_reference,
)

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
SUFFIX = ".sif"
GRACE_SECONDS = 24 * 3600.0
"""How long after its last use an image may still be mounted somewhere; longer than sandboxes live."""

ATTEMPTS = 20
"""Attempts to give a name that another process keeps removing; all but the first are quick."""
KINDS = {Definition: "build", Tree: "tree", DockerfileSource: "dockerfile", ArchiveSource: "import"}


@dataclass(frozen=True, slots=True)
class StoredImage:
    name: str
    path: Path
    size_bytes: int
    built_at: float
    """Unix time."""

    key: str
    """A hash of its inputs: equal keys are equal images. It is "" for a file that was put there by hand."""

    source: str
    """"" if it is not known."""

    pulled: bool


def default_root() -> Path:
    return Path(os.environ.get("ROLLOUT_IMAGES_DIR") or default_cache() / "images")


class ImageStore:
    """Its methods block: call them in a thread."""

    def __init__(self, root: Path | None = None, builder: ApptainerBuilder | None = None) -> None:
        self.root = (root or default_root()).expanduser().absolute()
        self._blobs = self.root / "blobs"
        self.builder = builder or ApptainerBuilder()
        self._shared = SharedFolder(self.root)

    def resolve(self, image: str | os.PathLike[str]) -> Path:
        """Return the file (or unpacked folder) of a name, a path, or a reference that has been pulled.

        A text with a slash or the suffix ".sif" is a path. Nothing is built or pulled. The use by this node is
        recorded.

        Raises:
            ImageNotFoundError: There is no such image; the hint names the command that makes it.
            ImageError: The image is a reference with a password in it.
        """
        if (path := self.find(image)) is not None:
            return path
        text = os.fspath(image)
        _, hint = self._find(text)
        names = ", ".join(stored.name for stored in self.list()) or "none"
        raise ImageNotFoundError(f"there is no image {text!r}; images here: {names}", hint=hint)

    def find(self, image: str | os.PathLike[str]) -> Path | None:
        """Do as `resolve`, but return None if there is no such image.

        Raises:
            ImageError: The text cannot be an image's, or is a reference with a password in it, or a path that cannot
                be looked at.
        """
        path, _ = self._find(os.fspath(image))
        try:
            if path is None or not path.exists():
                return None
        except OSError as error:
            raise ImageError(f"cannot look for the image {image}: {error.strerror}") from error
        if path.is_relative_to(self.root):
            self._stamp(path)
        return path

    def _find(self, text: str) -> tuple[Path | None, str]:
        """Return where the image would be, and advice if it is not there."""
        if REFERENCE.fullmatch(text):
            return self._pulled(text), f"rollout-service image pull {text}"
        if "/" in text or text.endswith(SUFFIX):
            return Path(text).expanduser().absolute(), "name an image file or an unpacked image"
        return self._link(text), self._how_to_make(text)

    def provide(
        self,
        source: Source,
        name: str | None = None,
        *,
        force: bool = False,
        progress: Progress | None = None,
    ) -> StoredImage:
        """Make the image and give it the name, at once if one was made from the same source before.

        Args:
            source: `sources.packaged` finds the definitions of this package.
            name: by default it follows from the source.
            force: make it even if it exists, for example to get newer packages.
            progress: called in this thread with each line of the builder.

        Raises:
            ImageNotFoundError: The source does not exist, or the name is not valid.
            ImageError: The source cannot be made into an image.
            ImageBuildError: The builder failed; the hint says what to do about the most common causes.
            ProviderUnavailableError: Apptainer is not installed.
        """
        link = self._link(name or _name_of(source))
        key, say = self._key(source), progress or (lambda _line: None)
        if not force and self._has_name(link, key):
            self._stamp(link)
            if (stored := self._stored(link)) is not None:
                return stored
        self._require_writable()
        self._shared.remove_dead_drafts()
        for attempt in range(ATTEMPTS):
            with self._shared.lock(key, waiting=lambda: say("waiting for another build of the same image")):
                another = force and attempt == 0
                blob = None if another else self._blob(key)
                if blob is None:
                    blob = self._make(source if another else self._begun(source), key, say, another=another)
                self._shared.stamp(blob.stem)
                with self._shared.lock("store"):
                    self._give_name(link, blob)
                    self._collect(mine=key)
            # Another process may have removed the name at once or, if locks do not hold here, the file.
            if (stored := self._stored(link)) is not None:
                return stored
        raise ImageBuildError(
            f"{source} was removed by another process as soon as it was made",
            hint="find out which process removes images from this folder, then try again",
        )

    def _require_writable(self) -> None:
        reason = "Permission denied"
        try:
            self._blobs.mkdir(parents=True, exist_ok=True)
            if os.access(self._blobs, os.W_OK):
                return
        except OSError as error:
            reason = error.strerror or str(error)
        raise ImageBuildError(
            f"cannot write to the images' folder {self.root}: {reason}",
            hint="build the image as the folder's owner, or set ROLLOUT_IMAGES_DIR to another folder",
        )

    def list(self) -> list[StoredImage]:
        found = (self._stored(link) for link in sorted(self.root.glob(f"*{SUFFIX}")))
        return [stored for stored in found if stored is not None]

    def remove(self, name: str) -> None:
        """Remove the name, and its image if no other name links to it and no other node uses it.

        Raises:
            ImageNotFoundError: There is no such name.
        """
        link = self._link(name)
        with self._shared.lock("store"):
            if not link.is_symlink() and not link.exists():
                raise ImageNotFoundError(f"there is no image {name!r}")
            link.unlink(missing_ok=True)
            self._collect()

    def prune(
        self,
        budget_bytes: int | None,
        *,
        keep: Collection[str] = (),
        grace_seconds: float = GRACE_SECONDS,
        dry_run: bool = False,
    ) -> Sequence[EvictionCandidate]:
        """Remove names, pulled images first, then by last use, until all fit the budget.

        Images in `keep`, and those that any node used within the grace period, are kept. Leftovers of dead builders and
        files without a name are always removed.

        Returns:
            Every name, with the decision about it; with `dry_run` nothing has been removed.
        """
        candidates = self._candidates(keep, grace_seconds)
        decided = evict(self._shared, candidates, budget_bytes, self._forget, dry_run=dry_run)
        if not dry_run and self.root.is_dir():
            with self._shared.lock("store"):
                self._collect()
        return decided

    def _forget(self, name: str) -> None:
        self._link(name).unlink(missing_ok=True)

    def _candidates(self, keep: Iterable[str], grace_seconds: float) -> Iterator[EvictionCandidate]:
        kept = {self._key_or_none(text) for text in keep}
        now = self._shared.now()
        seen: set[str] = set()
        for image in self.list():
            if (stem := _stem(image.path)) is None:
                continue
            used = max(self._shared.last_used(stem), image.built_at)
            reason = why_recent(now - used, grace_seconds)
            if stem in kept:
                reason = "an environment uses it"
            elif not image.key:
                reason = "it was put there by hand"
            yield EvictionCandidate(
                kind="image",
                name=image.name,
                size_bytes=0 if stem in seen else image.size_bytes,
                last_used=used,
                of=image.source,
                rank=0 if image.pulled else 1,
                kept=reason,
            )
            seen.add(stem)

    def _key_or_none(self, image: str) -> str | None:
        try:
            path, _ = self._find(image)
        except ImageNotFoundError:
            return None
        return _stem(path) if path is not None else None

    def _begun(self, source: Source) -> Source:
        if not isinstance(source, Definition) or not source.arguments:
            return source
        plain = self._blob(self._key(replace(source, arguments={})))
        if plain is not None:
            self._shared.stamp(plain.stem)
        return replace(source, begin=plain)

    def _make(self, source: Source, key: str, say: Progress, *, another: bool) -> Path:
        """Overwrite no file, because another node may have it mounted."""
        blob = self._blobs / (f"{key}-{secrets.token_hex(4)}{SUFFIX}" if another else f"{key}{SUFFIX}")
        with self._shared.draft(key) as draft:
            made = draft / blob.name
            self.builder.build(source, made, say)
            about = {"source": str(source), "kind": KINDS.get(type(source), "pull")}
            (draft / "about").write_text(json.dumps(about))
            # The stamp says that the new file is about to get a name.
            self._shared.stamp(blob.stem)
            (draft / "about").replace(blob.with_suffix(".json"))
            try:
                os.link(made, blob)
            except FileExistsError:
                pass  # another node has done the same work
            except OSError:  # a file system without hard links
                made.replace(blob)
        return blob

    def _stamp(self, link: Path) -> None:
        if (stem := _stem(link)) is not None:
            self._shared.stamp(stem)

    def _give_name(self, link: Path, blob: Path) -> None:
        with self._shared.draft("name") as draft:
            (draft / "link").symlink_to(blob.relative_to(self.root))
            (draft / "link").replace(link)

    def _has_name(self, link: Path, key: str) -> bool:
        """Return whether nothing is left to do; this works even if this user may not write."""
        newest = self._blob(key)
        return newest is not None and link.exists() and _stem(link) == newest.stem

    def _collect(self, mine: str = "") -> None:
        """Remove the files that no name links to, unless another node uses them or is making them.

        The caller holds the lock of `mine`.
        """
        linked = {_stem(path) for path in self.root.glob(f"*{SUFFIX}")}
        now = self._shared.now()
        for stem in {path.stem for path in self._blobs.glob("*")} - linked:
            # Locks show what this node is making.
            used = self._shared.last_used(stem, elsewhere=self._shared.locks_hold)
            if now - used < GRACE_SECONDS:
                continue
            key = stem.partition("-")[0]
            with (
                suppress(BlockingIOError),
                nullcontext() if key == mine else self._shared.lock(key, wait=False),
            ):
                for suffix in (SUFFIX, ".json"):
                    (self._blobs / f"{stem}{suffix}").unlink(missing_ok=True)
                self._shared.forget_uses(stem)

    def _blob(self, key: str) -> Path | None:
        """Return the newest file of this source."""
        found = [*self._blobs.glob(f"{key}{SUFFIX}"), *self._blobs.glob(f"{key}-*{SUFFIX}")]
        return max(found, key=modified, default=None)

    def _pulled(self, text: str) -> Path | None:
        try:
            return self._blob(self._key(source_of_reference(text)))
        except ImageNotFoundError:  # the archive is not there
            return None

    def _key(self, source: Source) -> str:
        return _hash(KINDS.get(type(source), "pull"), self.builder.version, *source.identity())

    def _stored(self, link: Path) -> StoredImage | None:
        try:
            status, blob = link.stat(), link.resolve()
        except FileNotFoundError:
            return None
        try:
            about = json.loads(blob.with_suffix(".json").read_text())
        except (OSError, ValueError):
            about = {}
        return StoredImage(
            name=link.name.removesuffix(SUFFIX),
            path=link,
            size_bytes=status.st_size,
            built_at=status.st_mtime,
            key=blob.stem.partition("-")[0] if link.is_symlink() else "",
            source=str(about.get("source", "")),
            pulled=about.get("kind") == "pull",
        )

    def _link(self, name: str) -> Path:
        if not NAME.fullmatch(name):
            raise ImageNotFoundError(
                f"{name!r} is not a valid image name",
                hint="use lower-case letters, digits, dots, dashes and underscores, at most 64 characters",
            )
        return self.root / f"{name}{SUFFIX}"

    def _how_to_make(self, name: str) -> str:
        if name in packaged_names():
            return f"rollout-service image build {name}"
        return f"rollout-service image build {name} --definition FILE, or name a file or docker://{name}"


def _stem(link: Path) -> str | None:
    """Return None if the name is being removed."""
    with suppress(FileNotFoundError):
        return link.resolve().stem
    return None


def _name_of(source: Source) -> str:
    if isinstance(source, DockerfileSource):
        return name_of_reference(source.context.resolve().name)
    if isinstance(source, ArchiveSource):
        return name_of_reference(source.tag or source.path.name.partition(".")[0])
    if isinstance(source, Definition | Tree):
        return source.path.stem
    return name_of_reference(source.text)


def _hash(*parts: str) -> str:
    """Put its length before each part, so that no two lists have one hash."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:32]
