"""Launch one Apptainer sandbox: join its control groups, make its namespaces and file systems, and exec apptainer.

It runs on its own, as `python -I -S launch.py APPTAINER ARGUMENTS...`, and imports little, since every sandbox pays
for it. Every mount, and the network, belongs to namespaces of this process and ends with the sandbox's last process.
As root it drops root before Apptainer starts. Its rights in its own user namespace end with the `exec`, and that
namespace allows no other below Apptainer's, so code inside cannot make one to gain rights in.

Environment variables are its instructions:
  LAUNCH_GROUPS       files of control groups to join, one per line
  LAUNCH_SPACE        a folder for the sandbox's files ("data"), its /sys, /dev/shm and /etc/hosts, and Apptainer's
                      own settings ("conf")
  LAUNCH_NAMESPACES   "1": a user namespace with mounts in it; without it an ordinary user gets neither
  LAUNCH_UIDS, LAUNCH_GIDS  ranges "FIRST COUNT" of this user's subordinate ids: with them, code inside is root in a
                      user namespace that maps them, and Apptainer needs no other
  LAUNCH_NETWORK      "1": a separate network, whose loopback is up
  LAUNCH_IMAGE        the image, shown at "image" in LAUNCH_SPACE
  LAUNCH_OVERLAY      "1": a writable overlay on the image, at "root" in LAUNCH_SPACE
  LAUNCH_LAYERS       what other sandboxes wrote, to lie between the image and the overlay, newest first: for each
                      a line "MOUNTS USERS OWNER SPACE" with descriptors of its mount and user namespaces (-1: the
                      host's users), the owner of its files, and its LAUNCH_SPACE
  LAUNCH_SAVED        two paths, one per line: `saved_files`, and an archive of what the sandbox begins with
  LAUNCH_POINTS       paths inside that Apptainer mounts something on, one per line; a folder ends with "/"
  LAUNCH_LISTENER     a descriptor of a Unix socket that listening sockets of that network are sent to
  LAUNCH_PORTS        the ports they listen on, on 127.0.0.1
  LAUNCH_BYTES        the size of the file system that LAUNCH_SPACE gets; without mounts, the limit on each file
  LAUNCH_FILTER       the system call filter in hexadecimal digits, see `seccomp`
  LAUNCH_PROFILE      the same for Apptainer to set, as JSON, which it finds at "filter.json" in LAUNCH_SPACE
and as root:
  LAUNCH_USER, LAUNCH_GROUP  the user and group to become
  LAUNCH_OWNER               another id for that user: the owner of its files on disk, and its id inside
  LAUNCH_BINDS               other paths to show, one per line, at "bind0", "bind1" ... in LAUNCH_SPACE
"""

# pathlib takes longer to import than all of this to run.
# ruff: noqa: PTH101, PTH102, PTH104, PTH106, PTH110, PTH112, PTH114, PTH115, PTH116, PTH120, PTH123, PTH208, SIM105

import ctypes
import fcntl
import os
import resource
import stat
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# From linux/sched.h, linux/mount.h, linux/prctl.h, linux/sockios.h and linux/if.h.
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x00020000, 0x10000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, MOUNT_ATTR_RDONLY, MOUNT_ATTR_IDMAP = 1, 4, 1, 0x00100000
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
ALL_IDS = (1 << 32) - 1
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
EPERM, ELOOP = 1, 40
KEYCTL_JOIN_SESSION_KEYRING = 1
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW = 1, 4
KEYCTL, SECCOMP = {"x86_64": (250, 317), "aarch64": (219, 277)}.get(os.uname().machine, (0, 0))
"""The numbers of system calls that the C library does not wrap; 0 if unknown."""
SIOCSIFFLAGS, IFF_UP, IFREQ_SIZE, NAME_SIZE = 0x8914, 1, 40, 16
AF_INET, SOCK_DGRAM = 2, 2

PREFIX = "LAUNCH_"
INODE_BYTES = 4096
"""One file is allowed per this many bytes of space, since empty files take kernel memory too."""
LEAST_INODES = 4096
BACKLOG = 64
FUSE = (10, 229)
PTYS = 64
"""The pseudo-terminals of one sandbox; the host has 4,096 for all."""
LIMITS = {
    resource.RLIMIT_NOFILE: 4096,
    resource.RLIMIT_SIGPENDING: 4096,
    resource.RLIMIT_MSGQUEUE: 1 << 20,
    resource.RLIMIT_MEMLOCK: 8 << 20,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_RTPRIO: 0,
    resource.RLIMIT_NICE: 0,
}
"""The limits on each process, for resources that the kernel counts per user or a process can multiply.

They are never above the host's. No process dumps core, since the host's handler could store it on the host's disk, and
none gains priority over others.
"""
OVERLAY = "lowerdir={lower},upperdir=data/upper,workdir=data/work,xino=on"
"""The layers, named relative to the space: a name may not contain a comma or a colon."""
MARK = "overlay.rollout"
LINKS = 40
"""The symbolic links that the kernel follows in one path."""
HOSTS = "127.0.0.1 localhost\n::1 localhost\n"

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: "Any") -> int:
    """Call a function of the C library, and raise OSError from errno if the result is negative."""
    result: int = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call mount(2)."""
    call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode(),
    )


def write(path: str, text: str) -> None:
    """Write text to a kernel file."""
    with open(path, "w") as file:
        file.write(text)


def new_user_namespace(others: int, user: int, group: int, inside: int) -> None:
    """Enter a user namespace whose only user is this one, as `inside`, together with the namespaces `others`."""
    call("unshare", CLONE_NEWUSER | others)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{inside} {user} 1")
    write("/proc/self/gid_map", f"{group} {group} 1")


def new_root_namespace(others: int, users: str, groups: str) -> None:
    """Enter the namespaces `others` and one in which this user is root and its subordinate ids are all other users.

    Only the host's setuid programs may map these ids, and only from outside, so a child starts them.
    """
    me, user, group = str(os.getpid()), str(os.geteuid()), str(os.getegid())
    wait, ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        status = 1
        try:
            if os.read(wait, 1):
                status = map_subordinate_ids(me, ("newuidmap", user, users), ("newgidmap", group, groups))
        finally:
            os._exit(status)
    os.close(wait)
    try:
        call("unshare", CLONE_NEWUSER | others)
        os.write(ready, b"x")
    finally:
        os.close(ready)
        _, status = os.waitpid(child, 0)
    if status:
        raise OSError("newuidmap and newgidmap could not map the subordinate ids")
    os.setgroups([])


def map_subordinate_ids(process: str, *maps: "tuple[str, str, str]") -> int:
    """Run the programs that write a process's maps; return a status that is 0 if all succeeded."""
    for program, own, ids in maps:
        status = os.spawnvp(os.P_WAIT, program, [program, process, "0", own, "1", "1", *ids.split()])  # noqa: S606
        if status:
            return 1
    return 0


def drop_root(user: int, group: int) -> None:
    """Drop root for good. Without "dumpable" the kernel would keep the files in /proc/self owned by root."""
    os.setgroups([])
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)


def allow_user_namespaces(count: int) -> None:
    """Allow only so many user namespaces below this one: Apptainer's own, if it makes one.

    If /proc/sys is not writable, code inside can make others, which give no rights outside.
    """
    try:
        write("/proc/sys/user/max_user_namespaces", str(count))
    except OSError:
        return


def set_limits() -> None:
    """Set the limits for good, in the new user namespace: the counts in the host's namespace stay as they were."""
    for what, most in LIMITS.items():
        _, hard = resource.getrlimit(what)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (least, least))


def leave_keyring() -> None:
    """Replace the service's session keyring by an empty one. If that fails, the filter still blocks all keys."""
    if KEYCTL:
        libc.syscall(KEYCTL, KEYCTL_JOIN_SESSION_KEYRING, None)


class FilterProgram(ctypes.Structure):
    """struct sock_fprog of linux/filter.h."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def set_filter(program: bytes) -> None:
    """Filter system calls from here on, in this process and everything it starts."""
    told = FilterProgram(len(program) // 8, program)
    call("syscall", SECCOMP, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, ctypes.byref(told))


def raise_loopback() -> None:
    """Bring up `lo`, with 127.0.0.1 and ::1."""
    fd = call("socket", AF_INET, SOCK_DGRAM, 0)
    request = b"lo".ljust(NAME_SIZE, b"\0") + IFF_UP.to_bytes(2, sys.byteorder)
    fcntl.ioctl(fd, SIOCSIFFLAGS, request.ljust(IFREQ_SIZE, b"\0"))
    os.close(fd)


def send_listeners(fd: int, ports: "list[int]") -> None:
    """Send the host sockets that listen here: a socket belongs to the network it was made in, whoever holds it."""
    import socket  # takes half as long as all the rest, and few sandboxes need it

    servers = [socket.create_server(("127.0.0.1", port), backlog=BACKLOG) for port in ports]
    with socket.socket(fileno=fd) as channel:
        socket.send_fds(channel, [b"listeners"], [server.fileno() for server in servers])
    for server in servers:
        server.close()


def mount_space(space: str, size: int) -> None:
    """Mount the file system for the sandbox's files, and a /sys that shows only this network."""
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
    """Mount separate pseudo-terminals where Apptainer takes the host's from; its own would have no limit."""
    options = f"ptmxmode=0666,mode=0620,max={PTYS}"
    mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    if os.path.exists("/dev/ptmx") and not os.path.islink("/dev/ptmx"):
        mount("/dev/pts/ptmx", "/dev/ptmx", None, MS_BIND)


def swap_ids(owner: int, user: int) -> str:
    """Return the lines of a map in which `owner` is `user`, nobody is `owner`, and all others are themselves."""
    low, high = sorted((owner, user))
    spans = ((0, low), (low + 1, high), (high + 1, ALL_IDS))
    lines = [f"{start} {start} {end - start}" for start, end in spans if end > start]
    return "\n".join([*lines, f"{owner} {user} 1"])


def make_id_mapping(owner: int, user: int) -> int:
    """Return a descriptor of a user namespace that maps `owner` to `user`, and all others to themselves."""
    ready, made = os.pipe()
    wait, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        try:
            call("unshare", CLONE_NEWUSER)
            os.write(made, b"x")
        finally:
            os.close(made)
            os.read(wait, 1)
            os._exit(0)
    os.close(made)
    os.close(wait)
    try:
        if not os.read(ready, 1):
            raise OSError("no user namespace could be made")
        write(f"/proc/{child}/uid_map", swap_ids(owner, user))
        write(f"/proc/{child}/gid_map", f"0 0 {ALL_IDS}")
        return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(end)
        os.close(ready)
        os.waitpid(child, 0)


class MountAttributes(ctypes.Structure):
    """struct mount_attr of linux/mount.h."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "namespace"))


def bind_mapped(source: str, target: str, namespace: int) -> None:
    """Bind a folder read-only where the sandbox's user can reach it, with owners mapped by the namespace."""
    tree = call("syscall", OPEN_TREE, AT_FDCWD, os.fsencode(source), OPEN_TREE_CLONE | AT_RECURSIVE)
    attach_tree(tree, target, namespace)


def attach_tree(tree: int, target: str, namespace: "int | None") -> None:
    """Mount a detached tree read-only, with owners mapped by the namespace if there is one, and close it."""
    os.mkdir(target)
    flags = MOUNT_ATTR_RDONLY | (MOUNT_ATTR_IDMAP if namespace is not None else 0)
    told = MountAttributes(flags, 0, 0, namespace or 0)
    size = ctypes.sizeof(told)
    call("syscall", MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH | AT_RECURSIVE, ctypes.byref(told), size)
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
    """Return a detached copy of the mount with what a sandbox wrote, in which nothing runs any more.

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
            shutil.rmtree(f"{space}/shm", ignore_errors=True)  # which no other sandbox sees
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
    """Bind a file or folder of root's where the sandbox's user can reach it."""
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    mount(source, target, None, MS_BIND | MS_REC)


def bind_image(image: str, target: str) -> None:
    """Bind an image folder, for a user to whom its files belong."""
    os.mkdir(target)
    mount(image, target, None, MS_BIND | MS_REC)


def overlay_options(lower: "list[str]") -> str:
    """Return the options for an overlay on these layers, uppermost first, whose upper layer lies on this space.

    The overlay notes in extended attributes which folders hide those of the image, and where they came from. Without a
    place for its notes it would still mount, but removing or renaming a folder of the image would fail with EIO. The
    attributes that the host's root may set also let folders be renamed; others can only use those of users, which
    tmpfs has since Linux 6.6.
    """
    overlay = OVERLAY.format(lower=":".join(lower))
    return f"{overlay},redirect_dir=on" if notes_are_trusted() else f"{overlay},userxattr"


def notes_are_trusted() -> bool:
    """Return whether an overlay in this folder makes its notes in attributes that only the host's root may set."""
    try:
        os.setxattr("data", f"trusted.{MARK}", b"")
    except OSError as error:
        if error.errno != EPERM:
            raise
        os.setxattr("data", f"user.{MARK}", b"")
        return False
    return True


def restore_files(told: str, upper: str, user: int, group: int) -> None:
    """Put saved files into the upper folder of an overlay. A child does it, which has that folder as its root."""
    program, archive = told.splitlines()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            from importlib.util import module_from_spec, spec_from_file_location

            spec = spec_from_file_location("saved_files", program)
            saved_files = module_from_spec(spec)  # type: ignore[arg-type]  # the file is there
            spec.loader.exec_module(saved_files)  # type: ignore[union-attr]
            prefix = saved_files.overlay_prefix(privileged=notes_are_trusted())
            with open(archive, "rb") as file:
                os.chroot(upper)
                os.chdir("/")
                saved_files.restore(file, user, group, prefix)
            status = 0
        except Exception as error:  # noqa: BLE001 - of whatever kind, it is one line of the report
            sys.stderr.write(f"launch: {type(error).__name__}: {error}\n")
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    if status:
        raise OSError("the saved files cannot be put in place")


def mount_overlay(space: str, user: int, group: int, layers: int, saved: str) -> None:
    """Mount a writable overlay on "image" and the layers at "root"; `saved` tells what is written in it already.

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
    mount("overlay", "root", "overlay", MS_NOSUID | MS_NODEV, overlay_options(lower))
    os.chdir("/")


def find_inside(root: str, path: str) -> str:
    """Return the host's path of a path inside, whose links are followed within `root`; it need not exist."""
    todo, done, links = path.split("/")[::-1], "", 0
    while todo:
        part = todo.pop()
        if part in {"", "."}:
            continue
        if part == "..":
            done = done.rpartition("/")[0]
            continue
        try:
            target = os.readlink(f"{root}{done}/{part}")
        except OSError:  # it is not a link, or does not exist
            done += f"/{part}"
            continue
        links += 1
        if links > LINKS:
            raise OSError(ELOOP, os.strerror(ELOOP), path)
        todo += target.split("/")[::-1]
        done = "" if target.startswith("/") else done
    return root + done


def make_point(root: str, path: str, user: int, group: int) -> None:
    """Make an empty folder, or a file if the path does not end with "/", unless the path exists."""
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


def bind_fuse(space: str) -> None:
    """Bind a FUSE device that everyone may use, since many hosts reserve theirs for root and image files need one."""
    device = f"{space}/fuse"
    try:
        os.mknod(device, stat.S_IFCHR, os.makedev(*FUSE))
        os.chmod(device, 0o666)  # noqa: S103  the usual mode
        mount(device, "/dev/fuse", None, MS_BIND)
    except OSError:
        return  # the host's own device may suffice, and unpacked images need none


class ApptainerLaunch:
    """The steps of a launch, in the order that the kernel requires."""

    def __init__(self, told: "dict[str, str]") -> None:
        self._space = told["SPACE"]
        self._size = int(told["BYTES"])
        self._user, self._group = int(told.get("USER", os.geteuid())), int(told.get("GROUP", os.getegid()))
        self._owner = int(told.get("OWNER", self._user))
        self._root = "USER" in told
        self._mounts = self._root or "NAMESPACES" in told
        self._told = told

    def run(self) -> None:
        """Run all steps; afterwards this process is ready to become Apptainer."""
        os.umask(0o022)  # code inside does not depend on how the service was started
        for file in self._told.get("GROUPS", "").splitlines():
            write(file, str(os.getpid()))
        leave_keyring()
        layers = self._copy_layers()
        self._enter_namespaces()
        if "NETWORK" in self._told:
            raise_loopback()
        if "LISTENER" in self._told:
            ports = [int(port) for port in self._told["PORTS"].split()]
            send_listeners(int(self._told["LISTENER"]), ports)
        if self._mounts:
            mount_space(self._space, self._size)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, self._size))
        for name in ("data", "conf", "sockets"):
            os.mkdir(f"{self._space}/{name}", 0o700)
            os.chown(f"{self._space}/{name}", self._user, self._group)
        if self._root:
            self._bind_sources()
        elif "IMAGE" in self._told:
            bind_image(self._told["IMAGE"], f"{self._space}/image")
        for number, (tree, owner) in enumerate(layers):
            self._attach_layer(tree, owner, f"{self._space}/layer{number}")
        if "OVERLAY" in self._told:
            self._mount_overlay(len(layers))
        write(f"{self._space}/hosts", HOSTS)
        os.chown(f"{self._space}/hosts", self._user, self._group)
        self._drop_rights()

    def _copy_layers(self) -> "list[tuple[int, int]]":
        """Return the trees of the layers, each with the owner of its files."""
        found = []
        for line in self._told.get("LAYERS", "").splitlines():
            mounts, users, owner, space = line.split(" ", 3)
            found.append((copy_layer(int(mounts), int(users), space), int(owner)))
            os.close(int(mounts))
            if int(users) >= 0:
                os.close(int(users))
        return found

    def _attach_layer(self, tree: int, owner: int, target: str) -> None:
        """Show what another sandbox wrote, whose user was another of the host if the service is root."""
        if not self._root or owner == self._user:
            attach_tree(tree, target, None)
            return
        namespace = make_id_mapping(owner, self._user)
        attach_tree(tree, target, namespace)
        os.close(namespace)

    def _enter_namespaces(self) -> None:
        """Enter the namespaces. Root's belong to the host's user namespace, where nobody inside has any rights."""
        others = CLONE_NEWNS | (CLONE_NEWNET if "NETWORK" in self._told else 0)
        if self._root:
            call("unshare", others)
        elif "UIDS" in self._told:
            new_root_namespace(others, self._told["UIDS"], self._told["GIDS"])
            self._user = self._group = 0
        elif self._mounts:
            new_user_namespace(others, self._user, self._group, self._user)

    def _bind_sources(self) -> None:
        namespace = make_id_mapping(self._owner, self._user) if self._owner != self._user else None
        if "IMAGE" in self._told:
            self._bind(self._told["IMAGE"], f"{self._space}/image", namespace, needed=True)
        for number, source in enumerate(self._told.get("BINDS", "").splitlines()):
            self._bind(source, f"{self._space}/bind{number}", namespace)
        bind_fuse(self._space)
        if namespace is not None:
            os.close(namespace)

    @staticmethod
    def _bind(source: str, target: str, namespace: "int | None", *, needed: bool = False) -> None:
        """Bind a source. A plain file is not mapped: whoever may read an image file sees its content as its own."""
        if namespace is None or not os.path.isdir(source):
            bind(source, target)
            return
        try:
            bind_mapped(source, target, namespace)
        except OSError:
            if needed:
                raise
            os.rmdir(target)
            bind(source, target)  # the file system cannot map owners: bind it as it is

    def _mount_overlay(self, layers: int) -> None:
        mount_overlay(self._space, self._user, self._group, layers, self._told.get("SAVED", ""))
        for path in self._told.get("POINTS", "").splitlines():
            make_point(f"{self._space}/root", path, self._user, self._group)

    def _drop_rights(self) -> None:
        """Drop all rights. Those in a separate user namespace end with `exec`, since its user is not root."""
        if self._root:
            self._set_filter()
            drop_root(self._user, self._group)
            if "NAMESPACES" in self._told:
                new_user_namespace(0, self._user, self._group, self._owner)
        if "NAMESPACES" in self._told:
            allow_user_namespaces(0 if "UIDS" in self._told else 1)
        if "PROFILE" in self._told:
            write(f"{self._space}/filter.json", self._told["PROFILE"])
        set_limits()
        if not self._root:
            self._set_filter()

    def _set_filter(self) -> None:
        """Set the filter. Unlike root, others must first give up gaining rights, which rules out newuidmap."""
        if "FILTER" not in self._told or not SECCOMP:
            return
        if not self._root:
            call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        set_filter(bytes.fromhex(self._told["FILTER"]))


def main() -> None:
    """Launch the sandbox. A failure is one line on standard error, which the provider reports."""
    told = {name[len(PREFIX) :]: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    try:
        ApptainerLaunch(told).run()
    except OSError as error:
        sys.exit(f"launch: {error}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    os.execve(sys.argv[1], sys.argv[1:], environment)  # noqa: S606  there is no shell


if __name__ == "__main__":
    main()
