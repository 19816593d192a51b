"""The layers of builds: folders named by a hash of their inputs, which later builds use again.

A layer is complete or not there: it is made in a draft and renamed. It belongs to users of the build namespace, so
`BuildNamespace.remove` removes it. Above a budget, the least recently used layers go first, but none that a build of
this machine has mounted, or has used within the grace period. A layer whose parent is gone can still be used: its name
says everything that it was made from.

The folder must be on a disk of this machine: overlays do not work on shared file systems.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandboxes.errors import ImageBuildError
from sandboxes.images.dockerfile.namespace import BuildNamespace
from sandboxes.images.dockerfile.step.watch import disk_use
from sandboxes.images.eviction import EvictionCandidate, evict, why_recent
from sandboxes.images.shared_folder import SharedFolder
from sandboxes.images.unpacked import NAME, mounted_folders

GRACE_SECONDS = 600.0
ABOUT = "layer.json"


@dataclass(frozen=True, slots=True)
class ImageLayer:
    key: str
    files: Path
    size_bytes: int
    """Disk use, without the layers below."""


def make_key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


class LayerStore:
    """A folder of layers that builds of one user share. Its methods block."""

    def __init__(self, root: Path, namespace: BuildNamespace) -> None:
        self.root = root.expanduser().absolute()
        self.namespace = namespace
        self._shared = SharedFolder(self.root, remove=namespace.remove)

    def find(self, key: str) -> ImageLayer | None:
        self._shared.stamp(key)  # before looking: `prune` looks at the stamp before it removes
        about = _about(self.root / key)
        return None if about is None else ImageLayer(key, self.root / key / "fs", int(about["size_bytes"]))

    def make(self, key: str, of: str, fill: Callable[[Path], None], waiting: Callable[[], None]) -> ImageLayer:
        """Make a layer, unless another build has made it meanwhile.

        `of` is the instruction, for people. `fill` gets a folder whose `fs` and `work` are an overlay's; if it raises,
        nothing is left. `waiting` is called if another build is making the layer.
        """
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._shared.remove_dead_drafts()
        with self._shared.lock(key, waiting=waiting):
            if (found := self.find(key)) is not None:
                return found
            with self._shared.draft(key) as draft:
                layer = draft / "layer"
                layer.mkdir(mode=0o755)
                for name in ("fs", "work"):
                    self.namespace.make_folder(layer / name)
                fill(layer)
                self.namespace.remove(layer / "work")
                about = {"of": of, "size_bytes": disk_use(str(layer / "fs"))}
                (layer / ABOUT).write_text(json.dumps(about))
                layer.rename(self.root / key)
        if (found := self.find(key)) is None:
            raise ImageBuildError(f"the layer {key} was removed as soon as it was made", hint="try again")
        return found

    def cache(self, name: str) -> Path:
        """Return the folder of a `RUN --mount=type=cache`, which all builds of this user share."""
        folder = self.root / "caches" / make_key(name)
        with suppress(FileExistsError):  # another build may make it now
            self.namespace.make_folder(folder)
        return folder

    def scratch(self) -> SharedFolder:
        """Return the folder in which images are packed; a draft of it is removed with its maker."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        return self._shared

    def prune(
        self, budget_bytes: int | None, *, grace_seconds: float = GRACE_SECONDS, dry_run: bool = False
    ) -> Sequence[EvictionCandidate]:
        """Remove layers until all fit the budget, least recently used first, and leftovers of dead builds always.

        Returns:
            Every layer, with the decision about it; with `dry_run` nothing has been removed.
        """
        candidates = self._candidates(grace_seconds)
        return evict(self._shared, candidates, budget_bytes, self._shared.discard, dry_run=dry_run)

    def _candidates(self, grace_seconds: float) -> Iterator[EvictionCandidate]:
        now, mounted = self._shared.now(), mounted_folders()
        for folder in self.root.iterdir():
            if NAME.fullmatch(folder.name) is None:
                continue
            about = _about(folder) or {"of": "", "size_bytes": 0}
            used = self._shared.last_used(folder.name)
            recent = why_recent(now - used, grace_seconds)
            reason = "a build has it mounted" if folder.name in mounted else recent
            yield EvictionCandidate("layer", folder.name, int(about["size_bytes"]), used, str(about["of"]), kept=reason)


def _about(layer: Path) -> dict[str, Any] | None:
    """Return None if the layer is not there."""
    try:
        about: dict[str, Any] = json.loads((layer / ABOUT).read_text())
    except (OSError, ValueError):
        return None
    return about
