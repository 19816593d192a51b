"""Environments that come inside of an image, at `/environment`."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from rollout_service.errors import ConfigurationError
from sandboxes.errors import ProviderUnavailableError
from sandboxes.host import find_apptainer, read_host_facts

INSIDE = "/environment"
SECONDS = 120.0


def extract_environment(image: Path, cache: Path | None = None) -> Path:
    """Copy `/environment` out of an image, once for each version of the image; returns the folder.

    Blocks for a second or so: call it in a thread. `cache` is where the copies are kept.

    Raises:
        ConfigurationError: the image holds none, or cannot be read.
    """
    status = image.stat()
    key = f"{image.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    cache = cache or _default_cache()
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=cache, prefix=".draft-"))
    try:
        with tarfile.open(fileobj=io.BytesIO(_read(image))) as tar:
            tar.extractall(draft, filter="data")
        draft.rename(folder)
    except (tarfile.TarError, OSError) as error:
        if not folder.is_dir():  # another process may have been first
            raise ConfigurationError(f"{INSIDE} of the image {image} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def empty_folder() -> Path:
    """A folder with nothing in it, to be shown in the place of one that nobody inside should see.

    It is below the system's temporary folder, where every user that sandboxes run as can reach it.
    """
    folder = Path(tempfile.gettempdir()) / f"rollout-service-empty-{os.geteuid()}"
    folder.mkdir(mode=0o555, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid() or any(folder.iterdir()):
        raise ConfigurationError(f"{folder} is not an empty folder of this user", hint="Remove it.")
    return folder


def _read(image: Path) -> bytes:
    try:
        apptainer = find_apptainer()
    except ProviderUnavailableError as error:
        raise ConfigurationError(f"the image {image} cannot be read: {error}", hint=error.hint) from error
    privileges = ["--no-privs"] if read_host_facts().needs_no_privs else []
    command = [str(apptainer), "exec", *privileges, "--containall", "--cleanenv", "--no-home", str(image)]
    try:
        done = subprocess.run(
            [*command, "tar", "-C", INSIDE, "-cf", "-", "."],
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigurationError(f"the image {image} could not be read in {SECONDS:g} s") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise ConfigurationError(
            f"the image {image} has no {INSIDE}: {said}",
            hint=f"Put an environment.toml into {INSIDE} of the image, or beside it.",
        )
    return done.stdout


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "rollout-service" / "environments"
