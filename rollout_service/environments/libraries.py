"""Packages with a virtual environment and processes of their own, since their requirements are not the service's.

Guarantees: an environment is complete or not there; one of other requirements has another folder.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollout_service.errors import ConfigurationError
from sandboxes.images.cache import default_cache

INSTALL_SECONDS = 1_800.0


@dataclass(frozen=True, slots=True)
class Library:
    """A package with its requirements."""

    name: str
    """Its name for `rollout-service env install`."""
    requirements: Path
    """A lock with the version and the hashes of every package: nothing else is installed."""
    prepare: Callable[[Path], None] | None = None
    """Called with the folder of the finished environment, before it counts as installed."""

    @property
    def folder(self) -> Path:
        """Where its virtual environment is."""
        key = self.requirements.read_bytes() + sys.version.encode()
        return default_cache() / "libraries" / f"{self.name}-{hashlib.sha256(key).hexdigest()[:16]}"

    @property
    def packages(self) -> Path:
        """Where its packages are; compiled ones need a Python of this minor version."""
        return self.folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    @property
    def is_installed(self) -> bool:
        """Whether the environment is there."""
        return (self.folder / "bin" / "python").exists()

    def python(self) -> Path:
        """Return the interpreter of its environment.

        Raises:
            ConfigurationError: It is not installed.
        """
        if not self.is_installed:
            raise ConfigurationError(
                f"the packages of {self.name!r} are not installed on this machine",
                hint=f"Install them: rollout-service env install {self.name}",
            )
        return self.folder / "bin" / "python"

    def install(self) -> Path:
        """Make the environment unless it is there, and return its folder. It takes seconds, so call it in a thread.

        Raises:
            ConfigurationError: The packages cannot be installed; the message has the end of what the installer said.
        """
        folder = self.folder
        if self.is_installed:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            dir=folder.parent, prefix=".draft-", ignore_cleanup_errors=True
        ) as draft:
            made = Path(draft) / "environment"
            for command in self._commands(made):
                _run(command)
            if self.prepare is not None:
                self.prepare(made)
            try:
                made.rename(folder)
            except OSError as error:
                if not self.is_installed:  # another process may have been first
                    raise ConfigurationError(f"{folder} cannot be made: {error}") from error
        return folder

    def _commands(self, folder: Path) -> list[list[str]]:
        """Return the commands that make the environment, with uv if it is there."""
        options = ["--no-deps", "--require-hashes", "--requirement", str(self.requirements)]
        python = str(folder / "bin" / "python")
        if uv := shutil.which("uv"):
            return [
                [uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
                [uv, "pip", "install", "--quiet", "--python", python, *options],
            ]
        return [
            [sys.executable, "-m", "venv", str(folder)],
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options],
        ]


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip()[-2_000:]
        raise ConfigurationError(
            f"{' '.join(command[:4])} failed: {said}",
            hint="Check that this machine reaches a package index, or set PIP_INDEX_URL or UV_DEFAULT_INDEX.",
        )
