"""Both distributions as wheels, and separate environments to install them in.

uv, the build backend and the package index are those that the scripts use.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
OLDEST = (3, 10)
MEBIBYTE = 2**20


def uv(*arguments: str | Path, stdin: str | None = None) -> str:
    """Run uv as the scripts do, and return what it printed."""
    # Without the lock of the scripts, which they hold while they install what later tests need.
    code = 'source "$1/scripts/lib.sh"; shift; ensure_uv >&2; "$uv" "$@" 2>&1'
    command = ["bash", "-c", f"set -euo pipefail; {code}", "bash", ROOT, *arguments]
    # uv must use the scripts' Python, not that of the tests' environment.
    environ = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(
        [str(part) for part in command], input=stdin, capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(project: Path, folder: Path) -> Path:
    """Build a source distribution, and a wheel from that; return the wheel."""
    pins = ROOT / "scripts" / "bootstrap.lock"
    uv("build", "--python", sys.executable, "--out-dir", folder, "--build-constraints", pins, project)
    (wheel,) = folder.glob("*.whl")
    return wheel


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment outside the checkout."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def installed(self) -> dict[str, str]:
        """Return the installed packages' versions by name."""
        lines = uv("pip", "freeze", "--python", self.python).replace(" @ ", "==").splitlines()
        return dict(line.split("==", 1) for line in lines if "==" in line)

    def mebibytes(self) -> dict[str, float]:
        """Return the size of each part of the environment, in MiB."""
        return {part.name: _size(part) / MEBIBYTE for part in self.packages.iterdir()}

    def run(self, *arguments: str | Path, timeout: float = 120.0) -> str:
        """Run a program of the environment in a folder without our packages; return its output."""
        done = subprocess.run(
            [str(self.folder / "bin" / arguments[0]), *(str(argument) for argument in arguments[1:])],
            cwd=self.folder,
            env={name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def make_environment(folder: Path, *requirements: str | Path, python: Path | str = sys.executable) -> Environment:
    """Install these packages in an empty environment."""
    uv("venv", "--python", python, folder)
    environment = Environment(folder)
    uv("pip", "install", "--python", environment.python, *requirements)
    return environment


def oldest_python() -> Path:
    """Return the oldest Python on this machine that the client supports, which may be that of the tests."""
    name = ".".join(map(str, OLDEST))
    for candidate in _candidates(f"python{name}", name):
        asked = [str(candidate), "-c", "import sys; print(*sys.version_info[:2])"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.stdout.split() == [str(part) for part in OLDEST]:
            return candidate
    return Path(sys.executable)


def _candidates(program: str, version: str) -> Iterator[Path]:
    if (found := shutil.which(program)) is not None:
        yield Path(found)
    yield from Path.home().glob(f".pyenv/versions/{version}.*/bin/{program}")


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in [path, *path.rglob("*")] if one.is_file())
