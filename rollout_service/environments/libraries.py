"""Packages with a virtual environment and processes of their own, since their requirements are not the service's.

Guarantees: an environment is complete or not there; other requirements have another folder. Packages that are not
installed, or cannot be, raise ConfigurationError, with the end of the installer's output.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import JsonValue

from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.dataset_files import read_instances
from sandboxes.config import default_cache

INSTALL_SECONDS = 1_800.0
START_SECONDS = 30.0
NEWER_MINORS = 3
"""Minor versions after the oldest that are looked for: later ones may lack builds of the packages."""


@dataclass(frozen=True, slots=True)
class Library:
    name: str
    """For `rollout-service env install`."""
    requirements: Path
    """A lock with hashes: nothing else is installed."""
    prepare: Callable[[Path], None] | None = None
    """Gets the folder of the environment before it counts as installed."""
    python_version: tuple[int, int] = (3, 11)
    """The oldest that will do. Where the service's own is older, another of the machine is looked for."""
    prepared_by: tuple[Path, ...] = ()
    """`prepare` depends on these files: once they differ, the environment is another."""

    @property
    def folder(self) -> Path:
        own = sys.version if sys.version_info >= self.python_version else f"at least {self.python_version}"
        files = (self.requirements, *self.prepared_by)
        key = b"".join(file.read_bytes() for file in files) + own.encode()
        return default_cache() / "libraries" / f"{self.name}-{hashlib.sha256(key).hexdigest()[:16]}"

    @property
    def packages(self) -> Path:
        """Compiled packages need a Python of this minor version."""
        own = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        name = next((path.name for path in (self.folder / "lib").glob("python3.*")), own)
        return self.folder / "lib" / name / "site-packages"

    @property
    def is_installed(self) -> bool:
        return (self.folder / "bin" / "python").exists()

    def python(self) -> Path:
        if not self.is_installed:
            raise ConfigurationError(
                f"the packages of {self.name!r} are not installed on this machine",
                hint=f"Install them: rollout-service env install {self.name}",
            )
        return self.folder / "bin" / "python"

    def instances(self, file: str) -> list[dict[str, JsonValue]]:
        """Read a file that was made when the library was installed."""
        return [dict(one) for one in _instances(self.python().parents[1] / file)]

    def install(self) -> Path:
        """Return the folder. It takes seconds, so call it in a thread."""
        return make_once(self.folder, self._make)

    def _make(self, folder: Path) -> None:
        for command in self._commands(folder):
            _run(command)
        if self.prepare is not None:
            self.prepare(folder)

    def _commands(self, folder: Path) -> list[list[str]]:
        options = ["--no-deps", "--require-hashes", "--requirement", str(self.requirements)]
        base = find_interpreter(self.name, self.python_version)
        python = str(folder / "bin" / "python")
        if uv := shutil.which("uv"):
            return [
                [uv, "venv", "--quiet", "--python", base, str(folder)],
                [uv, "pip", "install", "--quiet", "--python", python, *options],
            ]
        return [
            [base, "-m", "venv", str(folder)],
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *options],
        ]


@dataclass(frozen=True, slots=True)
class AddedPackages:
    """Packages of one environment besides a library's, in their own folder."""

    library: Library
    requirements: tuple[str, ...]
    """As pip takes them; paths are relative to `base`."""
    base: Path

    @property
    def folder(self) -> Path:
        key = "\0".join([str(self.base), *self.requirements])
        return self.library.folder.with_name(
            f"{self.library.folder.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        )

    def require(self) -> Path:
        if not self.folder.is_dir():
            raise ConfigurationError(
                f"{self.base}: its `requirements` are not installed on this machine",
                hint=f"Install them: rollout-service env install {self.base}",
            )
        return self.folder

    def install(self) -> Path:
        """Return their folder; the library keeps its own versions."""
        self.library.python()
        return make_once(self.folder, self._make)

    def _make(self, folder: Path) -> None:
        constraints = folder.with_name("constraints.txt")
        constraints.write_text("".join(f"{one}\n" for one in _versions(self.library.requirements)))
        options = ["--target", str(folder), "--constraint", str(constraints), *self.requirements]
        for command in self._commands(self.library.python(), folder.with_name("pip"), options):
            _run(command, self.base)

    def _commands(self, python: Path, pip: Path, options: list[str]) -> list[list[str]]:
        """Use uv if it is there, or a pip of the library's Python."""
        if uv := shutil.which("uv"):
            return [[uv, "pip", "install", "--quiet", "--python", str(python), *options]]
        base = find_interpreter(self.library.name, self.library.python_version)
        install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        return [[base, "-m", "venv", str(pip)], [str(pip / "bin" / "python"), *install, *options]]


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder, unless it is there, as a whole or not at all; beside its draft is other space.

    Raises:
        ConfigurationError: It cannot be put in place.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".draft-", ignore_cleanup_errors=True) as draft:
        made = Path(draft) / "made"
        make(made)
        try:
            made.rename(folder)
        except OSError as error:
            if not folder.is_dir():  # another process may have been first
                raise ConfigurationError(f"{folder} cannot be made: {error}") from error
    return folder


def _versions(lock: Path) -> list[str]:
    lines = lock.read_text().splitlines()
    return [line.removesuffix("\\").strip() for line in lines if line[:1].isalnum()]


def find_interpreter(name: str, oldest: tuple[int, int]) -> str:
    """Return the service's own Python, or the oldest on this machine that will do."""
    if sys.version_info >= oldest:
        return sys.executable
    found = next((path for path in _interpreters(oldest) if _starts(path, oldest)), None)
    if found is None:
        wanted = ".".join(map(str, oldest))
        raise ConfigurationError(
            f"{name!r} needs Python {wanted} or newer, and this machine has none",
            hint=f"Install one, such as with `uv python install {wanted}`, or put one on PATH as python{wanted}.",
        )
    return found


def _interpreters(oldest: tuple[int, int]) -> Iterator[str]:
    """Look on PATH, in pyenv (whose commands on PATH may not work), and ask uv."""
    major, minor = oldest
    folders = os.environ.get("PATH", "").split(os.pathsep)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for version in (f"{major}.{minor + newer}" for newer in range(NEWER_MINORS)):
        yield from (found for folder in folders if (found := shutil.which(f"python{version}", path=folder)))
        yield from (str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python{version}")))
        if uv := shutil.which("uv"):
            yield from _output([uv, "python", "find", "--managed-python", version]).split("\n")


def _starts(path: str, oldest: tuple[int, int]) -> bool:
    program = f"import sys; print(sys.version_info >= {oldest})"
    return bool(path) and _output([path, "-I", "-c", program]).strip() == "True"


def _output(command: list[str]) -> str:
    """Return nothing if the command failed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _run(command: list[str], folder: Path | None = None) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_SECONDS, cwd=folder)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{command[0]} failed: {error}") from error
    if done.returncode != 0:
        said = (done.stderr + done.stdout).strip()[-2_000:]
        raise ConfigurationError(
            f"{' '.join(command[:4])} failed: {said}",
            hint="Check that this machine reaches a package index, or set PIP_INDEX_URL or UV_DEFAULT_INDEX. A package "
            "that has to be built needs a C compiler and Python's headers, such as Debian's gcc and python3-dev.",
        )


@cache
def _instances(path: Path) -> list[dict[str, JsonValue]]:
    return read_instances(path)
