"""The file systems of a sandbox: its space, image, layers, overlay, and what it sees of the host."""

import os
import stat
import sys

from sandboxes.host.kernel_calls import (
    AT_FDCWD,
    AT_RECURSIVE,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    MOUNT_ATTR_IDMAP,
    MOUNT_ATTR_RDONLY,
    MOVE_MOUNT,
    MOVE_MOUNT_F_EMPTY_PATH,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    OPEN_TREE,
    OPEN_TREE_CLONE,
    call,
    find_inside,
    mount,
    set_mount_attributes,
)

INODE_BYTES = 4096
"""One file is allowed for so many bytes, since empty files take kernel memory too."""
LEAST_INODES = 4096
FUSE = (10, 229)
PTYS = 64
"""Pseudo-terminals of one sandbox; the host has 4,096 for all."""
OVERLAY = "lowerdir={lower},upperdir=data/upper,workdir=data/work,xino=on"
"""Layers have names relative to the space: a name may not contain a comma or a colon."""
MARK = "overlay.rollout"
EPERM = 1


def mount_space(space: str, size: int) -> None:
    inodes = max(LEAST_INODES, size // INODE_BYTES)
    options = f"size={size},nr_inodes={inodes},mode=0711"
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", space, "tmpfs", MS_NOSUID, options)
    for name in ("sys", "shm"):
        os.mkdir(f"{space}/{name}")
    os.chmod(f"{space}/shm", 0o1777)  # noqa: S103  the usual mode
    mount_terminals()
    try:
        mount("sysfs", f"{space}/sys", "sysfs", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except PermissionError:
        return  # not permitted for this network or by this host: the folder stays empty


def mount_terminals() -> None:
    """Mount separate pseudo-terminals for Apptainer; its own would have no limit."""
    options = f"ptmxmode=0666,mode=0620,max={PTYS}"
    mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    if os.path.exists("/dev/ptmx") and not os.path.islink("/dev/ptmx"):
        mount("/dev/pts/ptmx", "/dev/ptmx", None, MS_BIND)


def bind_mapped(source: str, target: str, namespace: int) -> None:
    tree = call("syscall", OPEN_TREE, AT_FDCWD, os.fsencode(source), OPEN_TREE_CLONE | AT_RECURSIVE)
    attach_tree(tree, target, namespace)


def attach_tree(tree: int, target: str, namespace: "int | None") -> None:
    os.mkdir(target)
    set_mount_attributes(
        tree, "", MOUNT_ATTR_RDONLY | (MOUNT_ATTR_IDMAP if namespace is not None else 0), namespace or 0
    )
    call("syscall", MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH)
    os.close(tree)


def move_files(upper: str, layer: str) -> None:
    """Move what a sandbox wrote to a folder beside it; several launchers may do this at once.

    The sandbox's overlay cannot be unmounted, because Apptainer's namespace locks it, and the folder of an overlay that
    is mounted must not become a layer of another.
    """
    found = os.stat(upper)
    try:
        os.mkdir(layer)
    except FileExistsError:
        pass
    os.chown(layer, found.st_uid, found.st_gid)
    os.chmod(layer, stat.S_IMODE(found.st_mode))
    for name in os.listdir(upper):
        try:
            os.rename(f"{upper}/{name}", f"{layer}/{name}")
        except FileNotFoundError:
            pass


def copy_layer(mounts: int, users: int, space: str) -> int:
    """Return a detached copy of the mount with what an ended sandbox wrote.

    A child enters that sandbox's namespaces, since whoever is not root cannot come back from them.
    """
    import shutil
    import socket  # these take longer than all the rest, and few sandboxes need them

    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if users >= 0:
                call("setns", users, CLONE_NEWUSER)
            call("setns", mounts, CLONE_NEWNS)
            try:
                shutil.rmtree(f"{space}/shm", ignore_errors=True)  # which no other sandbox sees
            except RecursionError:
                pass  # folders nested so deeply only take space
            layer = f"{space}/data/layer"
            move_files(f"{space}/data/upper", layer)
            tree = call("syscall", OPEN_TREE, AT_FDCWD, os.fsencode(layer), OPEN_TREE_CLONE)
            socket.send_fds(theirs, [b"layer"], [tree])
            status = 0
        except OSError as error:
            sys.stderr.write(f"launch: {error}\n")
        finally:
            os._exit(status)
    theirs.close()
    with ours:
        _, found, _, _ = socket.recv_fds(ours, 16, 1)
    os.waitpid(child, 0)
    if not found:
        raise OSError("the files of the snapshot cannot be reached")
    return found[0]


def bind(source: str, target: str) -> None:
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(source, target, None, MS_BIND | MS_REC)


def bind_image(image: str, target: str) -> None:
    os.mkdir(target)
    mount(image, target, None, MS_BIND | MS_REC)


def bind_fuse(space: str) -> None:
    """Make a FUSE device that everyone may use: image files need one, and many hosts reserve theirs for root."""
    device = f"{space}/fuse"
    try:
        os.mknod(device, stat.S_IFCHR, os.makedev(*FUSE))
        os.chmod(device, 0o666)  # noqa: S103  the usual mode
        mount(device, "/dev/fuse", None, MS_BIND)
    except OSError:
        return  # the host's own device may suffice, and unpacked images need none


def overlay_options(lower: "list[str]", *, plain: bool) -> str:
    """Return the options for an overlay on these layers, uppermost first.

    The overlay notes in extended attributes which folders hide those of the image, and where they came from; else
    removing or renaming a folder of the image would fail with EIO. The attributes that the host's root may set also let
    folders be renamed; others can only use those of users, which tmpfs has since Linux 6.6. A `plain` overlay has no
    notes, as Apptainer makes it.
    """
    overlay = OVERLAY.format(lower=":".join(lower))
    if plain:
        return overlay
    return f"{overlay},redirect_dir=on" if notes_are_trusted() else f"{overlay},userxattr"


def notes_are_trusted() -> bool:
    """Return whether an overlay here makes its notes in attributes that only the host's root may set."""
    try:
        os.setxattr("data", f"trusted.{MARK}", b"")
    except OSError as error:
        if error.errno != EPERM:
            raise
        os.setxattr("data", f"user.{MARK}", b"")
        return False
    return True


def restore_files(archive: str, upper: str, user: int, group: int) -> None:
    """Put saved files into the upper folder of an overlay, by a child that has it as its root."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            from .saved_files import (  # takes longer than all the rest, and few need it
                overlay_prefix,
                restore,
            )

            prefix = overlay_prefix(privileged=notes_are_trusted())
            with open(archive, "rb") as file:
                os.chroot(upper)
                os.chdir("/")
                restore(file, user, group, prefix)
            status = 0
        except Exception as error:  # noqa: BLE001 - of whatever kind, it is one line of the report
            sys.stderr.write(f"launch: {type(error).__name__}: {error}\n")
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if status:
        raise OSError("the saved files cannot be put in place")


def mount_overlay(space: str, user: int, group: int, layers: int, saved: str, *, plain: bool) -> None:
    """Mount a writable overlay on "image" and the layers at "root", with the files of `saved` in it.

    Nothing inside can change what lies below except through it.
    """
    os.chdir(space)
    for name in ("root", "data/upper", "data/work"):
        os.mkdir(name)
    lower = [*(f"layer{number}" for number in range(layers)), "image"]
    os.chmod("data/upper", stat.S_IMODE(os.stat(lower[0]).st_mode))
    os.chown("data/upper", user, group)
    if saved:
        restore_files(saved, "data/upper", user, group)
    mount("overlay", "root", "overlay", MS_NOSUID | MS_NODEV, overlay_options(lower, plain=plain))
    os.chdir("/")


def make_point(root: str, path: str, user: int, group: int) -> None:
    """Make a folder, or a file if the path does not end with "/", unless the path exists."""
    found = find_inside(root, path)
    missing = []
    while not os.path.lexists(found):
        missing.append(found)
        found = os.path.dirname(found)
    while missing:
        found = missing.pop()
        if missing or path.endswith("/"):
            os.mkdir(found, 0o755)
        else:
            os.close(os.open(found, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        os.chown(found, user, group)
