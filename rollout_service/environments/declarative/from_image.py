"""Environments that come inside of an image, at `/environment`."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from rollout_service.environments.declarative.declaration import INSIDE
from rollout_service.errors import ConfigurationError
from sandboxes.errors import ImageError, ProviderUnavailableError
from sandboxes.host.facts import find_apptainer
from sandboxes.images.squashfs import unpack
from sandboxes.images.store import default_cache
from sandboxes.images.tree import ImageTree


def extract_environment(image: Path, cache: Path | None = None) -> Path:
    """Copy the plain files below `/environment` out of an image, once for each version of it; returns the folder.

    The image is read and not started. It blocks for a second or so: call it in a thread. `cache` is where the copies
    are kept.

    Raises:
        ConfigurationError: the image holds none, or cannot be read.
    """
    status = image.stat()
    key = f"{image.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    cache = cache or default_cache() / "environments"
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".draft-", ignore_cleanup_errors=True) as draft:
        made = Path(draft) / "environment"
        try:
            tree = _tree(image, Path(draft) / "image")
            _copy(tree, _environment_of(tree, image), made)
            made.rename(folder)
        except OSError as error:
            if not folder.is_dir():  # another process may have been first
                raise ConfigurationError(
                    f"{INSIDE} of the image {image} cannot be copied: {error}"
                ) from error
        except (ImageError, ProviderUnavailableError) as error:
            raise ConfigurationError(f"the image {image} cannot be read: {error}", hint=error.hint) from error
    return folder


def _tree(image: Path, draft: Path) -> ImageTree:
    """The files of an image, of which `/environment` at least is there if the image has one."""
    if image.is_dir():
        return ImageTree(image)
    unpack(find_apptainer(), image, draft, only=[INSIDE])
    return ImageTree(draft)


def _environment_of(tree: ImageTree, image: Path) -> str:
    """Where the folder is, after links."""
    found = tree.find(INSIDE)
    if found is None or not tree.host(found).is_dir():
        raise ConfigurationError(
            f"the image {image} has no {INSIDE}",
            hint=f"Put an environment.toml into {INSIDE} of the image, or beside it.",
        )
    return found


def _copy(tree: ImageTree, path: str, target: Path) -> None:
    """Copy a folder: what is neither a plain file nor a folder is left out, and every link must lead to a file."""
    target.mkdir()
    for name in tree.names(path):
        inside = f"{path}/{name}"
        found = tree.find(inside)
        if found is None or (found != inside and tree.host(found).is_dir()):
            raise ConfigurationError(
                f"{inside} is a link that leads to no file of {INSIDE}", hint="Put the file itself there."
            )
        source = tree.host(found)
        if source.is_dir():
            _copy(tree, inside, target / name)
        elif source.is_file():
            shutil.copyfile(source, target / name)
            (target / name).chmod(0o755 if source.stat().st_mode & 0o111 else 0o644)


def empty_folder() -> Path:
    """A folder with nothing in it, to be shown in the place of one that nobody inside should see.

    It is below the system's temporary folder, where every user that sandboxes run as can reach it.
    """
    folder = Path(tempfile.gettempdir()) / f"rollout-service-empty-{os.geteuid()}"
    folder.mkdir(mode=0o555, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not an empty folder of this user", hint="Remove it.")
    return folder
