"""A user of the system, as `useradd` makes it and `su -` logs it in, with a clone of this repository.

While `as_user` hides everything that a test could spoil, this is the machine as a new user finds it: with an empty home
and the distribution's PATH. It needs root.
"""

import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from tests.support.users.as_user import end_processes

REPOSITORY = Path(__file__).parents[3]
PREFIX = "rollout-test-"
HANDED_ON = ("PIP_", "UV_", "SSL_CERT_", "ROLLOUT_APPTAINER", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
"""Prefixes of variables that are passed on: the source of packages depends on the machine, and is not tested."""

UNKEPT = {"UV_NO_CACHE": "1"}
"""Variables that turn off the cache, which would be used once and take a minute to remove."""


@dataclass(frozen=True, slots=True)
class NewUser:
    """A user that exists for as long as its context lasts."""

    name: str
    home: Path

    @property
    def checkout(self) -> Path:
        """The clone."""
        return self.home / "rollout-service"

    def run(self, command: str, *, timeout: float = 300.0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a line of shell in the clone, as after a login; `stdout` of the result has all its output."""
        handed = {name: value for name, value in os.environ.items() if name.upper().startswith(HANDED_ON)}
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in (handed | UNKEPT | variables).items())
        line = f"cd {shlex.quote(str(self.checkout))} && export {given} COLUMNS=200 && {{ {command}\n}}"
        return subprocess.run(
            ["su", "-", self.name, "-c", line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )

    def give_subordinate_ids(self) -> None:
        """Give the user subordinate ids that no other user has, as an administrator does."""
        count = 65_536
        first = 2_000_000_000 + int(self.name.removeprefix(PREFIX), 16) * count
        ids = f"{first}-{first + count - 1}"
        subprocess.run(["usermod", "--add-subuids", ids, "--add-subgids", ids, self.name], check=True)


@contextmanager
def new_user() -> Iterator[NewUser]:
    """Make a user without subordinate ids; at the end, remove it with all its files."""
    user = NewUser(name := PREFIX + secrets.token_hex(2), Path("/home") / name)
    none = ["-K", "SUB_UID_COUNT=0", "-K", "SUB_GID_COUNT=0"]
    command = ["useradd", "--create-home", "--home-dir", str(user.home), "--shell", "/bin/bash", *none]
    subprocess.run([*command, user.name], check=True)
    try:
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(REPOSITORY), str(user.checkout)]
        subprocess.run(clone, check=True)
        _give_pip_settings(user)
        subprocess.run(["chown", "--recursive", f"{user.name}:", str(user.home)], check=True)
        yield user
    finally:
        end_processes(partial(_processes, user))
        subprocess.run(["userdel", "--remove", "--force", user.name], check=True, capture_output=True)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a folder that every user may read."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _give_pip_settings(user: NewUser) -> None:
    for name in (".config/pip/pip.conf", ".pip/pip.conf"):
        if (file := Path.home() / name).is_file():
            (user.home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, user.home / name)


def _processes(user: NewUser) -> list[int]:
    found = psutil.process_iter(["pid", "username", "status"])
    return [
        one.info["pid"]
        for one in found
        if one.info["username"] == user.name and one.info["status"] != psutil.STATUS_ZOMBIE
    ]
