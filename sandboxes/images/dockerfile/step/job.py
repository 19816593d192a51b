"""A step's job, from the namespaces to the report."""

import ctypes
import json
import os
import posixpath
import sys
import tarfile

from sandboxes.host.kernel_calls import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUTS,
    PR_SET_SECCOMP,
    SECCOMP_MODE_FILTER,
    FilterProgram,
    call,
    change_root,
    end_with_parent,
    enter_user_namespace,
    map_subordinate_ids,
    raise_loopback,
    write,
)

from . import StepError
from .files import Writer, send_files
from .mounts import make_points, mount_system, remove_points
from .overlay import CHANGES, ROOT, Layers, mount_image, paths_of
from .program import execute, run_tool
from .watch import FullError, watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Step:
    def __init__(self, job: "dict[str, Any]", report: int) -> None:
        self._job = job
        self._report = report
        self._single = job["ids"]["kind"] == "single"

    def run(self) -> int:
        job = self._job
        self._enter()
        if job["action"] == "tool":
            return run_tool(job["argv"])
        points = make_points(job) if job["action"] == "run" else []
        exit_code = watch(self._start(), f"{CHANGES}/fs", job["max_bytes"])
        remove_points(points)
        return exit_code

    def _enter(self) -> None:
        job, parent, layers = self._job, os.getppid(), Layers()
        network = CLONE_NEWNET if job["network"] == "none" else 0
        _enter_namespaces(job["ids"], CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | network)
        layers.open(paths_of(job))
        _become_root(parent, groups=not self._single)
        if network:
            raise_loopback()
        mount_image(job, layers)

    def _start(self) -> int:
        """Start process 1 of a namespace, below which nothing of the host is left."""
        call("unshare", CLONE_NEWPID)
        child = os.fork()
        if child:
            return child
        status = 125
        try:
            end_with_parent()
            call("unshare", CLONE_NEWNS)
            status = self._inside()
        except (StepError, OSError, OverflowError, ValueError, tarfile.TarError) as error:
            say(self._report, {"error": str(error)})
        finally:
            sys.stdout.flush()
            os._exit(status)

    def _inside(self) -> int:
        job = self._job
        if job["action"] == "run":
            mount_system(job)
        change_root(ROOT)
        if self._single:  # calls that need more users than there are succeed without effect
            program = FilterProgram.of(bytes.fromhex(job["pretend"]))
            call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
        if job["action"] == "write":
            return Writer(job).run()
        if job["action"] == "read":
            return send_files(job["sources"])
        if job["action"] == "folder":
            os.makedirs(posixpath.normpath(posixpath.join(job["cwd"], job["dest"])), exist_ok=True)
            return 0
        return execute(job, single=self._single)


def _enter_namespaces(ids: "dict[str, Any]", others: int) -> None:
    """Enter a user namespace and others.

    The ids are mapped by this process's user if that is root, else by the host's setuid programs.
    """
    user, group = os.geteuid(), os.getegid()

    def map_ids(process: int) -> int:
        if ids["kind"] == "subordinate":
            return map_subordinate_ids(process, ids["users"], ids["groups"])
        if ids["kind"] == "single":
            write(f"/proc/{process}/setgroups", "deny")
            users, groups = f"{user} 1", f"{group} 1"
        else:
            users, groups = ids["users"], ids["groups"]
        write(f"/proc/{process}/uid_map", f"0 {users}")
        write(f"/proc/{process}/gid_map", f"0 {groups}")
        return 0

    enter_user_namespace(others, map_ids)


def _become_root(parent: int, *, groups: bool) -> None:
    """Become root of the namespace, and end with the parent; `groups` says whether this process may leave its own."""
    if groups:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    end_with_parent()
    if os.getppid() not in {parent, 0}:
        os._exit(1)


def say(report: int, line: "dict[str, Any]") -> None:
    os.write(report, json.dumps(line).encode() + b"\n")


def main() -> None:
    with os.fdopen(int(sys.argv[1]), "rb") as file:
        job = json.loads(file.read())
    report = int(sys.argv[2])
    os.set_inheritable(report, False)
    said: dict[str, Any]
    try:
        said = {"exit": Step(job, report).run()}
    except FullError:
        said = {"full": True}
    except (OSError, StepError) as error:
        said = {"error": str(error)}
    say(report, said)
