"""The mounts that a step adds: devices, processes, host names, and those of its instruction."""

import os
import posixpath

from sandboxes.host.kernel_calls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_REC, find_inside, mount, write

from . import StepError
from .overlay import ROOT, SPACE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
HOSTS_FILES = ("/etc/resolv.conf", "/etc/hosts")
SCRIPTS = "/dev/pipes"
APT_SETTINGS = "/dev/apt.conf"


def make_points(job: "dict[str, Any]") -> "list[str]":
    """Make what `mount_system` mounts on; return the files that no layer should keep."""
    made = []
    for path in ("dev", "proc", "sys", "tmp"):
        _make_point(f"{ROOT}/{path}", folder=True)
    if job["network"] != "none":
        for path in HOSTS_FILES:
            point = find_inside(ROOT, path)
            if os.path.exists(path) and _make_point(point, folder=False):
                made.append(point)
    for number, one in enumerate(job["mounts"]):
        source = _source(number, one)
        point = find_inside(ROOT, posixpath.join(job["cwd"], one["target"]))
        _make_point(point, folder=os.path.isdir(source))
    return made


def remove_points(paths: "list[str]") -> None:
    """Remove files of `make_points`, unless the program has written to them."""
    for path in paths:
        if os.path.isfile(path) and os.path.getsize(path) == 0:
            os.unlink(path)


def _make_point(path: str, *, folder: bool) -> bool:
    """Return whether it is new."""
    if os.path.lexists(path):
        return False
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    return True


def mount_system(job: "dict[str, Any]") -> None:
    """Call it in a mount namespace of the program's own."""
    _mount_devices(f"{ROOT}/dev")
    for name, text in job["scripts"].items():
        os.makedirs(ROOT + SCRIPTS, exist_ok=True)
        write(f"{ROOT}{SCRIPTS}/{name}", text)
        os.chmod(f"{ROOT}{SCRIPTS}/{name}", 0o755)  # noqa: S103  every user runs it
    write(ROOT + APT_SETTINGS, 'APT::Sandbox::User "root";\n')
    mount("proc", find_inside(ROOT, "/proc"), "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if job["network"] != "none":
        for path in HOSTS_FILES:
            if os.path.exists(path):
                mount(os.path.realpath(path), find_inside(ROOT, path), None, MS_BIND)
    for number, one in enumerate(job["mounts"]):
        _mount_asked(number, one, job["cwd"])


def _mount_devices(dev: str) -> None:
    mount("tmpfs", dev, "tmpfs", MS_NOSUID, "size=16m,mode=0755")
    for name in DEVICES:
        write(f"{dev}/{name}", "")
        mount(f"/dev/{name}", f"{dev}/{name}", None, MS_BIND)
    for name, target in (("fd", "/proc/self/fd"), ("ptmx", "pts/ptmx")):
        os.symlink(target, f"{dev}/{name}")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{dev}/{name}")
    os.mkdir(f"{dev}/pts")
    mount("devpts", f"{dev}/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    os.mkdir(f"{dev}/shm")
    mount("tmpfs", f"{dev}/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")


def _mount_asked(number: int, one: "dict[str, Any]", cwd: str) -> None:
    point = find_inside(ROOT, posixpath.join(cwd, one["target"]))
    if one["kind"] == "tmpfs":
        mount("tmpfs", point, "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
    else:
        mount(_source(number, one), point, None, MS_BIND | MS_REC)


def _source(number: int, one: "dict[str, Any]") -> str:
    if one["kind"] == "tmpfs":
        return SPACE
    if one["kind"] == "cache":
        return f"{SPACE}/from{number}"
    source = find_inside(f"{SPACE}/from{number}", one["source"])
    if not os.path.lexists(source):
        raise StepError(f"--mount: {one['source']} is not there")
    return source
