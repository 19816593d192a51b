"""A machine with a real systemd as its process 1, as namespaces of this one. Only root can make it.

It sees this one's files. What it writes stays in it, in memory, and ends with the block. `sudo` is a script there,
since this machine may lack it.
"""

import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
END_SECONDS = 10.0
START_SECONDS = 30.0
SUDO = """#!/bin/bash
# Runs a command as root or, with `-u NAME`, as another user with its own HOME.
if [[ $1 != -u ]]; then exec "$@"; fi
export HOME=$(getent passwd "$2" | cut -d: -f6)
exec setpriv --reuid "$2" --regid "$2" --init-groups -- "${@:3}"
"""
TARGET = """[Unit]
DefaultDependencies=no
"""
# Arguments: a folder to mount things on, the script, and the target. The root is one mount with its changes in memory,
# since Apptainer does not find its own files if it is installed below another.
BOOT = """
set -eu
scratch=$1
mount --make-rprivate /
mount -t tmpfs tmpfs "$scratch"
mkdir "$scratch/upper" "$scratch/work" "$scratch/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work" "$scratch/root"
cd "$scratch/root"
mount -t proc proc proc
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs tmpfs run
mkdir -p run/systemd/system usr/local/bin
[ ! -f ~/.config/pip/pip.conf ] || cp ~/.config/pip/pip.conf etc/pip.conf
printf %s "$2" >usr/local/bin/sudo
chmod 755 usr/local/bin/sudo
printf %s "$3" >run/systemd/system/boot.target
pivot_root . mnt
umount --lazy /mnt
umount --recursive --lazy /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
exec env -i container=lxc PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --system --unit=boot.target --log-target=console --show-status=no
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine, while its systemd runs."""

    pid: int
    """The systemd, as this host numbers it."""
    log: Path

    def run(self, line: str, *, timeout: float = 300.0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a line of shell as the machine's root; `stdout` of the result has all its output."""
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--uts", "--ipc", "--cgroup"]
        return subprocess.run(
            [*enter, "bash", "-c", f"cd /\n{line}"],
            env=_environment() | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )

    def file(self, path: str) -> Path:
        """Return the path by which this host reaches one of the machine's files."""
        return Path(f"/proc/{self.pid}/root{path}")


@contextmanager
def systemd_machine(scratch: Path) -> Iterator[Machine]:
    """Start a machine, and end it with all its processes; `scratch` is an empty folder for what it writes."""
    log = scratch / "systemd.log"
    group = _unified() / f"rollout-test-{secrets.token_hex(4)}"
    group.mkdir()
    spaces = ["--pid", "--mount", "--uts", "--ipc", "--cgroup", "--fork", "--kill-child=KILL"]
    command = ["unshare", *spaces, "bash", "-c", BOOT, "boot", str(scratch), SUDO, TARGET]
    try:
        with log.open("w") as output:
            process = subprocess.Popen(
                ["sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(group), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            yield _wait_until_it_runs(process, log)
        finally:
            process.kill()
            process.wait(END_SECONDS)
    finally:
        _remove(group)


def _wait_until_it_runs(process: subprocess.Popen[bytes], log: Path) -> Machine:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        for child in psutil.Process(process.pid).children():
            machine = Machine(child.pid, log)
            if child.name() == "systemd" and "running" in machine.run("systemctl is-system-running").stdout:
                return machine
        time.sleep(0.1)
    raise AssertionError(f"systemd does not run:\n{log.read_text()}")


def _unified() -> Path:
    """Return the hierarchy of version 2, which systemd needs, though without controllers where version 1 has them."""
    return CGROUPS / "unified" if (CGROUPS / "unified").is_dir() else CGROUPS


def _environment() -> dict[str, str]:
    """Return the variables of this process, without those of its Python environment and of the project's settings."""
    ours = ("ROLLOUT_", "PYTHON", "VIRTUAL_ENV", "COVERAGE_", "PYTEST_", "XDG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return kept | {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}


def _remove(group: Path) -> None:
    until = time.monotonic() + END_SECONDS
    for folder in sorted([group, *(path for path in group.rglob("*") if path.is_dir())], reverse=True):
        while time.monotonic() < until:
            try:
                folder.rmdir()
            except OSError:
                time.sleep(0.05)
            else:
                break
