"""Environments that come inside an image, at `/environment`."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.declarative.declaration import INSIDE
from rollout_service.environments.libraries import make_once
from sandboxes.config import default_cache
from sandboxes.errors import ImageError, ProviderUnavailableError
from sandboxes.host.facts import find_apptainer
from sandboxes.images.squashfs import unpack
from sandboxes.images.tree import ImageTree


def extract_environment(image: Path, cache: Path | None = None) -> Path:
    """Copy regular files below `/environment` out of an image, once per version of it.

    The image is not started. This blocks for about a second. `cache` is the folder of the copies.

    Raises:
        ConfigurationError: The image has no such folder, or cannot be read.
    """
    status = image.stat()
    key = f"{image.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    cache = cache or default_cache() / "environments"

    def copy(folder: Path) -> None:
        try:
            tree = _tree(image, folder.with_name("image"))
            _copy(tree, _environment_of(tree, image), folder)
        except OSError as error:
            raise ConfigurationError(f"{INSIDE} of the image {image} cannot be copied: {error}") from error
        except (ImageError, ProviderUnavailableError) as error:
            raise ConfigurationError(f"the image {image} cannot be read: {error}", hint=error.hint) from error

    return make_once(cache / hashlib.sha256(key.encode()).hexdigest()[:32], copy)


def _tree(image: Path, draft: Path) -> ImageTree:
    """Unpack only `/environment` of an image file."""
    if image.is_dir():
        return ImageTree(image)
    unpack(find_apptainer(), image, draft, only=[INSIDE])
    return ImageTree(draft)


def _environment_of(tree: ImageTree, image: Path) -> str:
    found = tree.find(INSIDE)
    if found is None or not tree.host(found).is_dir():
        raise ConfigurationError(
            f"the image {image} has no {INSIDE}",
            hint=f"Put an environment.toml into {INSIDE} in the image, or into a folder next to it.",
        )
    return found


def _copy(tree: ImageTree, path: str, target: Path) -> None:
    """Copy regular files and folders; every link must lead to a file."""
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
    """Return an empty folder to show in place of one that nobody inside a sandbox should see.

    Every user that runs sandboxes can reach it.
    """
    folder = Path(tempfile.gettempdir()) / f"rollout-service-empty-{os.geteuid()}"
    folder.mkdir(mode=0o555, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not an empty folder of this user", hint="Remove it.")
    return folder
