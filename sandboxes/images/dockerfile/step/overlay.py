"""The image of a step: an overlay of its layers at `ROOT`, with a folder that takes the changes.

Everything is mounted below `SPACE`, in this mount namespace alone.
"""

import os
import stat

from sandboxes.host.kernel_calls import MS_BIND, MS_NODEV, MS_NOSUID, MS_PRIVATE, MS_REC, mount, write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SPACE = "/tmp"  # noqa: S108  where the layers are mounted, because every user can enter it
ROOT, CHANGES, OUTPUT = f"{SPACE}/root", f"{SPACE}/changes", f"{SPACE}/out"


class Layers:
    """The folders that a step mounts: opened by path before this process changes its user, bound by descriptor after.

    The new user, root of the namespace, may not be allowed to enter the folders above them.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._descriptors: dict[str, int] = {}

    def open(self, paths: "list[str]") -> None:
        for path in paths:
            if path not in self._descriptors:
                self._descriptors[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)

    def bind(self, path: str, target: str) -> None:
        if stat.S_ISDIR(os.fstat(self._descriptors[path]).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            write(target, "")
        mount(f"/proc/self/fd/{self._descriptors[path]}", target, None, MS_BIND | MS_REC)

    def stack(self, layers: "list[str]", target: str, options: str = "") -> None:
        """Mount an overlay of layers, topmost first; options name the folders for changes."""
        names = []
        for path in layers:
            if path not in self._numbers:
                self._numbers[path] = len(self._numbers)
                self.bind(path, f"{SPACE}/{self._numbers[path]}")
            names.append(str(self._numbers[path]))
        # An overlay has two layers at least.
        while not names or (len(names) == 1 and not options):
            os.makedirs(f"{SPACE}/empty", exist_ok=True)
            names.append("empty")
        os.makedirs(target, exist_ok=True)
        os.chdir(SPACE)
        mount("overlay", target, "overlay", 0, f"lowerdir={':'.join(names)},userxattr{options}")
        os.chdir("/")


def paths_of(job: "dict[str, Any]") -> "list[str]":
    found = [*job["layers"], *(path for path in (job["changes"], job["output"]) if path)]
    for one in job["mounts"]:
        found += [*one["layers"], *([one["path"]] if one["path"] else [])]
    return [*found, *job["inputs"]]


def mount_image(job: "dict[str, Any]", layers: Layers) -> None:
    """Mount the image at `ROOT`. A folder for changes has "fs" and "work" in it."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", SPACE, "tmpfs", MS_NOSUID | MS_NODEV, "size=16m,mode=0711,uid=0,gid=0")
    os.umask(0o022)
    for source, target in ((job["changes"], CHANGES), (job["output"], OUTPUT)):
        if source:
            layers.bind(source, target)
    for number, path in enumerate(job["inputs"]):
        layers.bind(path, f"{SPACE}/in{number}")
    if job["changes"]:
        layers.stack(job["layers"], ROOT, ",upperdir=changes/fs,workdir=changes/work,volatile")
    elif job["layers"]:
        layers.stack(job["layers"], ROOT)
    for number, one in enumerate(job["mounts"]):
        if one["kind"] == "bind":
            layers.stack(one["layers"], f"{SPACE}/from{number}")
        elif one["kind"] == "cache":
            layers.bind(one["path"], f"{SPACE}/from{number}")
