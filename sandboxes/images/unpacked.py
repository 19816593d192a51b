"""Images unpacked on disk, each once for all its sandboxes: no FUSE, a shared page cache, faster starts.

A folder is complete or not there. It belongs to the user that sandboxes run as, and is only ever the lower layer of
their overlays, so none of them can change it. An image file that is replaced counts as another image.

When an image is unpacked, folders of images that are no longer there are removed, and the least recently used of the
others if they exceed the budget or the disk is full. Folders that a process of this machine has mounted, or that were
used a moment ago, stay.

It should be on a disk of this machine, while the image files may be on a shared one.
"""

import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandboxes.errors import ImageError
from sandboxes.images import squashfs, toolkit
from sandboxes.images.eviction import EvictionCandidate, evict, why_recent
from sandboxes.images.facts import ImageFacts, read_facts
from sandboxes.images.shared_folder import SharedFolder

logger = logging.getLogger(__name__)

GRACE_SECONDS = 600.0
"""Long enough for any start to have mounted its image."""

HEAD_BYTES = 4096
NAME = re.compile(r"[0-9a-f]{24}")
FORMAT = "5"
"""Changes with the facts that are read from an image."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    folder: Path
    facts: ImageFacts


class UnpackedImages:
    """Several services of one user may share the folder. Its methods block."""

    def __init__(self, apptainer: Path, root: Path, user: int, group: int, budget_bytes: int | None = None) -> None:
        self._apptainer = apptainer
        self.root = root.expanduser().absolute()
        self._owner = (user, group)
        self._budget_bytes = budget_bytes
        self._shared = SharedFolder(self.root)
        self._facts_folder = self.root / "facts"
        self._seen: dict[str, ImageFacts] = {}

    def provide(self, image: Path) -> Unpacked:
        """Unpack an image file if needed, which takes seconds for each 100 MB.

        An image that is a folder is used as it is.

        Raises:
            ImageError: The image cannot be unpacked; the message is Apptainer's.
        """
        if image.is_dir():
            name = self._name("folder", image)
            return Unpacked(image, self._facts(name, image, str(image)))
        name = self._name("image", image)

        def unpack(draft: Path) -> None:
            self._unpack(image, draft)

        folder = self._make(name, str(image), unpack)
        return Unpacked(folder, self._facts(name, folder, str(image)))

    def facts(self, image: Path) -> ImageFacts:
        """Unpack an image file temporarily if it is not unpacked.

        Raises:
            ImageError: The image cannot be unpacked.
        """
        name = self._name("folder" if image.is_dir() else "image", image)
        folder = image if image.is_dir() else self.root / name
        if folder.exists() or name in self._seen or self._facts_file(name).exists():
            return self._facts(name, folder, str(image))
        self._private()
        with self._shared.draft(name) as draft:
            self._unpack(image, draft / "root")
            return self._facts(name, draft / "root", str(image))

    def toolkit(self, base: Path) -> Path:
        """Return the folder of this image's Python toolkit; see `toolkit.py`.

        Raises:
            ImageError: No toolkit can be made from this image.
        """
        name = self._name(f"toolkit {toolkit.RECIPE}", base)
        if (self.root / name).exists():
            self._shared.stamp(name)
            return self.root / name
        unpacked = self.provide(base)

        def make(draft: Path) -> None:
            draft.mkdir()
            toolkit.assemble(unpacked.folder, unpacked.facts, draft)
            self._give_away(draft)

        return self._make(name, f"the toolkit of {base}", make)

    def prune(
        self, budget_bytes: int | None, *, grace_seconds: float | None = None, dry_run: bool = False
    ) -> Sequence[EvictionCandidate]:
        """Remove folders, least recently used first, until all fit the budget.

        Leftovers of dead services, and folders of images that are no longer there, are always removed.

        Returns:
            Every folder, with the decision about it; with `dry_run` nothing has been removed.
        """
        candidates = self._candidates(GRACE_SECONDS if grace_seconds is None else grace_seconds)
        return evict(self._shared, candidates, budget_bytes, self._remove, dry_run=dry_run)

    def _make(self, name: str, image: str, make: Callable[[Path], None]) -> Path:
        folder = self.root / name
        # Stamp before looking: `prune` looks at the stamp before it removes.
        self._private()
        self._shared.stamp(name)
        if folder.exists():
            return folder
        self._shared.remove_dead_drafts()
        with self._shared.lock(name):
            if folder.exists():
                return folder
            try:
                self._make_once(name, image, make)
            except ImageError as error:
                if os.strerror(errno.ENOSPC) not in str(error) or not self._make_room(image):
                    raise
                self._make_once(name, image, make)
        self.prune(self._budget_bytes)
        return folder

    def _make_once(self, name: str, image: str, make: Callable[[Path], None]) -> None:
        with self._shared.draft(name) as draft:
            made = draft / "root"
            make(made)
            self._facts(name, made, image)
            made.rename(self.root / name)

    def _make_room(self, image: str) -> bool:
        """Remove every folder that may be removed; return whether there was one."""
        removed = [one for one in self.prune(0) if one.evicted]
        logger.warning("the disk was full while %s was unpacked: removed %d unpacked images", image, len(removed))
        return bool(removed)

    def _unpack(self, image: Path, target: Path) -> None:
        squashfs.unpack(self._apptainer, image, target)
        self._give_away(target)

    def _give_away(self, folder: Path) -> None:
        if os.geteuid() == 0:
            squashfs.run(["chown", "-hR", "{}:{}".format(*self._owner), str(folder)])

    def _facts(self, name: str, folder: Path, image: str) -> ImageFacts:
        if name not in self._seen:
            file = self._facts_file(name)
            try:
                self._seen[name] = ImageFacts.from_json(json.loads(file.read_text())["facts"])
            except (OSError, ValueError, TypeError, KeyError):
                self._seen[name] = read_facts(folder, self._descriptor(image))
                known = {"image": image, "file": self._identity(image), "facts": self._seen[name].as_json()}
                self._write(file, known)
        return self._seen[name]

    def _identity(self, image: str) -> list[str | int]:
        """Return what no file that replaces the image has; nothing if the image is gone."""
        try:
            return list(identity_of(Path(image)))
        except OSError:
            return []

    def _descriptor(self, image: str) -> Mapping[str, object]:
        """Return nothing for things that are not image files."""
        if not Path(image).is_file():
            return {}
        return squashfs.read_descriptor(self._apptainer, Path(image))

    def _private(self) -> None:
        """Let no other user enter the root: folders in it belong to the user of sandboxes."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _facts_file(self, name: str) -> Path:
        return self._facts_folder / f"{name}.json"

    def _write(self, file: Path, data: Mapping[str, object]) -> None:
        self._private()
        self._facts_folder.mkdir(exist_ok=True)
        with self._shared.draft("facts") as draft:
            (draft / file.name).write_text(json.dumps(data))
            (draft / file.name).replace(file)

    def _candidates(self, grace_seconds: float) -> Iterator[EvictionCandidate]:
        now, mounted = self._shared.now(), mounted_folders()
        for folder in self.root.iterdir():
            if NAME.fullmatch(folder.name) is None:
                continue
            used = max(self._shared.last_used(folder.name), folder.stat().st_ctime)
            recent = why_recent(now - used, grace_seconds)
            reason = "a sandbox has it mounted" if folder.name in mounted else recent
            size = self._facts(folder.name, folder, "").size_bytes
            image, gone = self._image_of(folder.name)
            yield EvictionCandidate("unpacked", folder.name, size, used, image, useless=gone, kept=reason)

    def _image_of(self, name: str) -> tuple[str, bool]:
        """Return a folder's image, and whether that file is gone or was replaced."""
        try:
            known = json.loads(self._facts_file(name).read_text())
        except (OSError, ValueError):
            return "", False
        image = str(known.get("image", ""))
        if not Path(image).is_absolute():
            return image, False
        found = self._identity(image)
        return image, not found or ("file" in known and known["file"] != found)

    def _remove(self, name: str) -> None:
        self._shared.discard(name)
        self._facts_file(name).unlink(missing_ok=True)
        self._seen.pop(name, None)

    def _name(self, kind: str, image: Path) -> str:
        """Name it by path, size and time, which identify the file, and by the user it is unpacked for."""
        try:
            found = identity_of(image)
        except OSError as error:
            raise ImageError(f"cannot read the image {image}: {error.strerror}") from error
        return hashlib.sha256(repr((FORMAT, kind, *found, self._owner)).encode()).hexdigest()[:24]


def identity_of(image: Path) -> tuple[str, int, int]:
    """Follow links.

    Raises:
        OSError: It cannot be read.
    """
    resolved = image.resolve()
    found = resolved.stat()
    return str(resolved), found.st_size, found.st_mtime_ns


def portable_identity(image: Path) -> str:
    """Return the same on all hosts with this image file: its head has its id, or its date and sizes.

    Raises:
        OSError: It cannot be read.
    """
    if image.is_dir():
        return file_identity(image)
    with image.open("rb") as file:
        head, found = file.read(HEAD_BYTES), os.fstat(file.fileno())
    return f"{hashlib.sha256(head).hexdigest()} {found.st_size} {found.st_mtime_ns}"


def file_identity(path: Path) -> str:
    """Return a text that changes with a file of this host, or with the entries of a folder.

    Raises:
        OSError: It cannot be read.
    """
    found = path.stat()
    return f"{path} {found.st_dev}:{found.st_ino} {found.st_size} {found.st_mtime_ns}"


def mounted_folders() -> set[str]:
    """Return the folder names (24 hexadecimal digits) in the mounts of any process."""
    names: set[str] = set()
    seen: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            space = str((process / "ns" / "mnt").readlink())
            if space in seen:
                continue
            names.update(re.findall(r"/([0-9a-f]{24})[/ ]", (process / "mountinfo").read_text(errors="replace")))
        except OSError:  # it ended, or belongs to another user, whose images are elsewhere
            continue
        seen.add(space)
    return names
