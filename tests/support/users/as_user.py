"""Runs commands as a real ordinary user, for tests that run as root.

    python -m tests.support.users.as_user -- python -m sandboxes.conformance apptainer
    python -m tests.support.users.as_user --fuse -- pytest tests/conformance -k "test_apptainer and bash"

    from tests.support.users.as_user import ordinary_user
    with ordinary_user() as user:
        done = user.run(["python", "-m", "sandboxes.conformance", "apptainer"], timeout=300)
        assert done.returncode == 0, done.stdout
        assert user.remaining_processes() == []

The user has its own number, name, home folder, cache and subordinate ids (for fakeroot), and no other groups. It finds
this checkout, its Python and the image store at their places, read-only, even if these are below a folder that it may
not enter. /dev/fuse is closed to it unless asked for, as on many hosts. All of this is arranged in a separate mount
namespace for each command, so nothing on the machine changes. At the end its processes are killed, found by their user
and not by name, and its files in /tmp are removed. If the caller is already an ordinary user, commands run as that
user, with only a new home folder.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sandboxes.images.store import ImageStore

REPOSITORY = Path(__file__).resolve().parents[3]
FIRST_USER = 1_000_000
"""A user's number is this plus the pid of the process that asked, which makes it unique at any time."""
FIRST_SUBORDINATE, SUBORDINATES = 200_000_000, 65_536
SUBORDINATE_RANGES = 25_600
"""The number of ranges; all of them end below the user ids that root's sandboxes run as."""
NAME = "rollout-tester"
END_SECONDS = 5.0

# Arguments: scratch folder, command... In the scratch folder, "etc" is what to show as /etc, "hidden" lists the folders
# to cover, and "shown" lists what to show afterwards: a path and its target, on two lines. /etc is covered as a whole:
# a mount on one of its files would vanish as soon as the host replaces the file, as `useradd` does.
SHOW = """
number=0
while read -r path && read -r target; do
  number=$((number + 1))
  if [ -d "$path" ]; then mkdir "$scratch/$$-$number"; else : >"$scratch/$$-$number"; fi
  mount --bind "$path" "$scratch/$$-$number"
done <"$scratch/shown"
while read -r path; do mount -t tmpfs -o mode=0755 tmpfs "$path"; done <"$scratch/hidden"
number=0
while read -r path && read -r target; do
  number=$((number + 1))
  if [ -d "$scratch/$$-$number" ]; then mkdir -p "$target"; else : >>"$target"; fi
  mount --bind "$scratch/$$-$number" "$target"
  mount -o remount,bind,ro "$target"
done <"$scratch/shown"
"""
"""Covers the folders listed in `$scratch/hidden`, and shows the paths listed in `$scratch/shown` again."""
SETUP = f"""
set -eu
scratch=$1
shift
{SHOW}mount --bind "$scratch/etc" /etc
if [ -e "$scratch/closed" ] && [ -e /dev/fuse ]; then mount --bind "$scratch/closed" /dev/fuse; fi
cd "$START"
unset START
exec setpriv --reuid="$TEST_USER" --regid="$TEST_USER" --clear-groups --inh-caps=-all -- "$@"
"""


@dataclass(frozen=True, slots=True)
class OrdinaryUser:
    """A user who is not root, for as long as its context lasts."""

    uid: int
    home: Path
    _scratch: Path | None
    """The folder where root has prepared the mounts; None if the caller is the user."""

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float = 600.0,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        capture: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; `stdout` of the result has both standard output and standard error.

        Raises:
            subprocess.TimeoutExpired: The command took longer; its whole process group has been killed.
        """
        process = self.start(command, env=env, cwd=cwd, stdout=subprocess.PIPE if capture else None)
        try:
            said, _ = process.communicate(timeout=timeout)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(list(command), process.returncode, said, "")

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = REPOSITORY,
        stdout: int | None = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a command as the leader of a process group; its process keeps its pid until it ends."""
        entries = {**self.environment, **(env or {})}
        arguments = list(command)
        if self._scratch is not None:
            setup = ["sh", "-c", SETUP, "as-user", str(self._scratch)]
            arguments = ["unshare", "--mount", "--propagation", "private", "--", *setup, *arguments]
            entries |= {"TEST_USER": str(self.uid), "START": str(cwd)}
        return subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT if stdout is not None else None,
            env=entries,
            cwd=cwd if self._scratch is None else "/",
            text=True,
            errors="replace",
            start_new_session=True,
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables of its commands; the caller's are left out, except those that say where tools are."""
        kept = ("ROLLOUT_APPTAINER", "TERM")
        return {
            **{name: os.environ[name] for name in kept if name in os.environ},
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.home),
            "TMPDIR": str(self.home / "tmp"),
            "USER": NAME,
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_ADDOPTS": "-p no:cacheprovider",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.home / "hypothesis"),
        }

    def processes(self) -> list[int]:
        """Return the processes of this user and its subordinate ids; none if the user is the caller."""
        return [] if self._scratch is None else [pid for pid, _ in _processes({self.uid, *_range(self.uid)})]

    def remaining_processes(self) -> list[int]:
        """Return the processes that outlive what started them by 5 seconds; nothing of the service may."""
        deadline = time.monotonic() + END_SECONDS
        while (pids := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return pids


@contextmanager
def ordinary_user(*, fuse: bool = False) -> Iterator[OrdinaryUser]:
    """Make an ordinary user; with `fuse`, it may open /dev/fuse if the machine has one."""
    scratch = Path(tempfile.mkdtemp(prefix="rollout-user-", dir="/tmp"))
    try:
        if os.geteuid() != 0:
            (scratch / "tmp").mkdir()
            yield OrdinaryUser(os.geteuid(), scratch, None)
            return
        scratch.chmod(0o755)
        user = OrdinaryUser(FIRST_USER + os.getpid(), scratch / "home", scratch)
        _prepare(user, scratch, fuse=fuse)
        try:
            yield user
        finally:
            end_processes(user.processes)
            _remove_files(user)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _prepare(user: OrdinaryUser, scratch: Path, *, fuse: bool) -> None:
    for folder in (user.home, user.home / "tmp", user.home / ".cache", user.home / ".cache/rollout-service"):
        folder.mkdir()
        os.chown(folder, user.uid, user.uid)
    etc = scratch / "etc"
    subprocess.run(["cp", "--archive", "/etc", etc], check=True)
    ids = f"{NAME}:{_range(user.uid).start}:{SUBORDINATES}\n"
    lines = {
        "passwd": f"{NAME}:x:{user.uid}:{user.uid}::{user.home}:/bin/bash\n",
        "group": f"{NAME}:x:{user.uid}:\n",
        "subuid": ids,
        "subgid": ids,
    }
    for name, line in lines.items():
        with (etc / name).open("a") as file:
            file.write(line)
    shown, hidden = covered_paths()
    pairs = [(path, path) for path in shown]
    if (images := ImageStore().root).is_dir():
        pairs.append((images.resolve(), user.home / ".cache/rollout-service/images"))
    (scratch / "shown").write_text("".join(f"{path}\n{target}\n" for path, target in pairs))
    (scratch / "hidden").write_text("".join(f"{path}\n" for path in hidden))
    if not fuse:
        (scratch / "closed").touch(mode=0o000)


def covered_paths() -> tuple[list[Path], list[Path]]:
    """Return the paths of this project and its Python that others may not reach, and the topmost folders in the way.

    Each of those folders is covered.
    """
    wanted = (REPOSITORY, Path(sys.base_prefix), Path(sys.prefix))
    shown: list[Path] = []
    hidden: dict[Path, None] = {}
    for path in wanted:
        closed = next((part for part in (*reversed(path.parents), path) if _closed(part)), None)
        if closed is not None and not any(path.is_relative_to(other) for other in shown):
            shown += sorted(path.iterdir()) if closed == path else [path]
            hidden[closed] = None
    return shown, list(hidden)


def _closed(path: Path) -> bool:
    return path.stat().st_mode & 0o005 != 0o005


def _range(uid: int) -> range:
    start = FIRST_SUBORDINATE + uid % SUBORDINATE_RANGES * SUBORDINATES
    return range(start, start + SUBORDINATES)


def _processes(uids: set[int]) -> list[tuple[int, int]]:
    """Return the pids and users of live processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "status").read_text().split("\n")
                state = next(line for line in fields if line.startswith("State:"))
                uid = next(int(line.split()[1]) for line in fields if line.startswith("Uid:"))
                if uid in uids and "Z" not in state.split()[1]:
                    found.append((int(entry.name), uid))
    return found


def end_processes(processes: Callable[[], list[int]]) -> None:
    """End all processes of a user; those with a subordinate id belong to one of them and end with it."""
    deadline = time.monotonic() + END_SECONDS
    while (pids := processes()) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _remove_files(user: OrdinaryUser) -> None:
    for path in Path("/tmp").iterdir():
        with suppress(FileNotFoundError):
            if path.lstat().st_uid == user.uid:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def main() -> int:
    """Run the command of the command line; return its exit code."""
    parser = argparse.ArgumentParser(description="run a command as an ordinary user")
    parser.add_argument("--fuse", action="store_true", help="let the user open /dev/fuse")
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    with ordinary_user(fuse=arguments.fuse) as user:
        return user.run(arguments.command, timeout=3600, capture=False).returncode


if __name__ == "__main__":
    sys.exit(main())
