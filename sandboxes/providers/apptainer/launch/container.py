"""Make a sandbox's container as Apptainer made that of an earlier one, without running Apptainer.

Apptainer takes most of the time of a start to find out what to do, which is the same for all sandboxes of a kind. The
provider knows from the first its environment and its files in /etc; the rest is in Apptainer's arguments.

Guarantee: nothing of the image is read or run before all rights are given up. The process that makes the container has
imported everything by then, and becomes the image's bash by one `execve`.
"""

import ctypes
import os
import resource
import sys

from sandboxes.host.kernel_calls import (
    AT_FDCWD,
    CLONE_NEWIPC,
    CLONE_NEWNS,
    CLONE_NEWPID,
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    PR_CAP_AMBIENT,
    PR_CAP_AMBIENT_CLEAR_ALL,
    PR_SET_NO_NEW_PRIVS,
    call,
    change_root,
    end_with_parent,
    find_inside,
    keep_capabilities,
    libc,
    mount,
    set_mount_attributes,
    write,
)

from .rights import new_user_namespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

DEVICES = ("tty", "null", "zero", "random", "urandom")
LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
DEV_OPTIONS = "size=64k,nr_inodes=64,mode=755"
"""Room for what is made here and little else: code inside may write there, and it is not part of the disk limit."""
SIGNALS, SIG_DFL, SIG_IGN, SIG_SETMASK = 64, 0, 1, 2
TO_WHOLE_JOBS = (1, 2, 10, 12, 15)
"""SIGHUP, SIGINT, SIGUSR1, SIGUSR2 and SIGTERM: Slurm sends them to every process of a job, where the service's own end
decides."""
SIGNAL_SET_BYTES = 128
COPY_BYTES = 1 << 20
CAPABILITY_VERSION = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3: two words for each set."""


class ContainerCommand:
    """Apptainer's arguments, with its binds and the command inside."""

    def __init__(self, arguments: "list[str]", image: str) -> None:
        self.arguments, self._image = arguments, image
        where = arguments.index(image)
        self._options, self.inside = arguments[:where], arguments[where + 1 :]

    def replaced(self, argument: str, by: str) -> "ContainerCommand":
        return ContainerCommand([by if each == argument else each for each in self.arguments], self._image)

    def binds(self) -> "Iterator[tuple[str, str, bool]]":
        for flag, value in zip(self._options, self._options[1:], strict=False):
            if flag == "--bind":
                source, *rest = value.split(":")
                yield source, rest[0] if rest else source, rest[1:] == ["ro"]


def run_container(
    space: str,
    command: ContainerCommand,
    environ: "dict[str, str]",
    etc: "dict[str, str]",
    original: "str | None" = None,
) -> "NoReturn":
    """Run a command in a container of the overlay in a space, and exit as it does.

    `etc` has files inside, by path. With the path of an `original`, the command's program is a copy of that which can
    be executed but not read, and is removed once it runs.
    """
    root = f"{space}/root"
    user, group = os.geteuid(), os.getegid()
    new_user_namespace(CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC, user, group, user)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            end_with_parent()
            call("unshare", CLONE_NEWNS)
            make_container(space, root, command, etc)
            give_up_rights()
            program = command.inside[0]
            become(
                program if original is None else copy_program(original, program),
                command.inside,
                environ,
                begins,
            )
        except OSError as error:
            sys.stderr.write(f"launch: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(1)
    for number in TO_WHOLE_JOBS:
        libc.signal(number, SIG_IGN)
    os.close(begins)
    os.read(begun, 1)
    if original is not None:
        remove_file(f"{space}/shm/{os.path.basename(command.inside[0])}")
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def make_container(space: str, root: str, command: ContainerCommand, etc: "dict[str, str]") -> None:
    mount(root, root, None, MS_BIND | MS_REC)  # the mount itself is locked, since another namespace made it
    make_devices(find_inside(root, "/dev"))
    mount("proc", find_inside(root, "/proc"), "proc", MS_NOSUID | MS_NODEV)
    for number, (path, content) in enumerate(etc.items()):
        source = f"{space}/conf/etc{number}"
        write(source, content)
        bind_inside(root, source, path, MOUNT_ATTR_NOSUID)
    for source, target, read_only in command.binds():
        device = source.startswith("/dev/")
        attributes = MOUNT_ATTR_NOSUID | (0 if device else MOUNT_ATTR_NODEV)
        bind_inside(root, source, target, attributes | (MOUNT_ATTR_RDONLY if read_only else 0))
    change_root(root)


def bind_inside(root: str, source: str, target: str, attributes: int) -> None:
    """Bind a path of the host; links in `target` are followed within `root`."""
    found = find_inside(root, target)
    mount(source, found, None, MS_BIND | MS_REC)
    set_mount_attributes(AT_FDCWD, found, attributes)


def make_devices(dev: str) -> None:
    mount("tmpfs", dev, "tmpfs", MS_NOSUID, DEV_OPTIONS)
    for name in ("shm", "mqueue", "pts"):
        os.mkdir(f"{dev}/{name}", 0o755)
    for name in (*DEVICES, "ptmx"):
        write(f"{dev}/{name}", "")
    for name in DEVICES:
        mount(f"/dev/{name}", f"{dev}/{name}", None, MS_BIND)
    for name, target in LINKS.items():
        os.symlink(target, f"{dev}/{name}")
    mount("mqueue", f"{dev}/mqueue", "mqueue", MS_NOSUID | MS_NODEV)


def give_up_rights() -> None:
    """Give up all capabilities for good."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    keep_capabilities(frozenset())
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    call("capset", header, none)


def copy_program(original: str, path: str) -> str:
    """Make a copy that can be executed but not read; return its path, or the original's if that fails."""
    try:
        with open(original, "rb") as source, open(path, "xb") as copy:
            while part := source.read(COPY_BYTES):
                copy.write(part)
        os.chmod(path, 0o111)  # noqa: S103  the image's bash, for the sandbox's only user
    except OSError:
        return original
    return path


def remove_file(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def become(program: str, command: "list[str]", environ: "dict[str, str]", begins: int) -> "NoReturn":
    """Become a program inside, with none of this process's descriptors and signal settings.

    The descriptor `begins` is closed as it begins.
    """
    os.dup2(begins, 3, inheritable=False)
    os.closerange(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    # Python ignores some signals, and whoever started the service may have ignored others.
    for signal in range(1, SIGNALS + 1):
        libc.signal(signal, SIG_DFL)
    libc.sigprocmask(SIG_SETMASK, bytes(SIGNAL_SET_BYTES), None)
    os.execve(program, command, environ)  # noqa: S606  there is no shell
