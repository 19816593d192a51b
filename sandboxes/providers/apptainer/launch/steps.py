"""The steps of a launch, in the order that the kernel requires."""

import os
import resource
import sys

from sandboxes.host.kernel_calls import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    PR_SET_NO_NEW_PRIVS,
    SECCOMP,
    SIGCHLD,
    call,
    libc,
    raise_loopback,
    set_filter,
    write,
)

from .container import SIG_DFL, ContainerCommand, run_container
from .files import (
    attach_tree,
    bind,
    bind_fuse,
    bind_image,
    bind_mapped,
    copy_layer,
    make_point,
    mount_overlay,
    mount_space,
)
from .rights import (
    allow_user_namespaces,
    drop_root,
    leave_keyring,
    make_id_mapping,
    new_root_namespace,
    new_user_namespace,
    set_limits,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "LAUNCH_"
INSIDE, FILE = "INSIDE_", "FILE_"
BACKLOG = 64
PLAIN = "plain"
HOSTS = "127.0.0.1 localhost\n::1 localhost\n"


class ApptainerLaunch:
    def __init__(self, told: "dict[str, str]") -> None:
        self._space = told["SPACE"]
        self._size = int(told["BYTES"])
        self._user, self._group = int(told.get("USER", os.geteuid())), int(told.get("GROUP", os.getegid()))
        self._owner = int(told.get("OWNER", self._user))
        self._root = "USER" in told
        self._mounts = self._root or "NAMESPACES" in told
        self._told = told

    def run(self) -> None:
        # Neither code inside nor this depends on how the service was started.
        os.umask(0o022)
        libc.signal(SIGCHLD, SIG_DFL)
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
        if "SAVED" in self._told:
            self._pass_gate()  # those files count as the sandbox's memory
        if "OVERLAY" in self._told:
            self._mount_overlay(len(layers))
        write(f"{self._space}/hosts", HOSTS)
        os.chown(f"{self._space}/hosts", self._user, self._group)
        self._drop_rights()
        self._pass_gate()

    def _pass_gate(self) -> None:
        """Wait until this process is in its control groups; nothing of the sandbox may run outside."""
        if "GATE" in self._told:
            gate = int(self._told.pop("GATE"))
            if not os.read(gate, 1):
                raise OSError("the start was given up")
            os.close(gate)

    def _copy_layers(self) -> "list[tuple[int, int]]":
        found = []
        if "LAYERS" in self._told:
            self._pass_gate()  # an earlier sandbox decides how many files have to be moved
        for line in self._told.get("LAYERS", "").splitlines():
            mounts, users, owner, space = line.split(" ", 3)
            found.append((copy_layer(int(mounts), int(users), space), int(owner)))
            os.close(int(mounts))
            if int(users) >= 0:
                os.close(int(users))
        return found

    def _attach_layer(self, tree: int, owner: int, target: str) -> None:
        """Map owners if the service is root, and the other sandbox's user was another of the host."""
        if not self._root or owner == self._user:
            attach_tree(tree, target, None)
            return
        namespace = make_id_mapping(owner, self._user)
        attach_tree(tree, target, namespace)
        os.close(namespace)

    def _enter_namespaces(self) -> None:
        """Root's belong to the host's user namespace, where nobody inside has any rights."""
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
        """Map folders only: whoever may read an image file sees its content as its own."""
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
        saved, plain = self._told.get("SAVED", ""), self._told["OVERLAY"] == PLAIN
        mount_overlay(self._space, self._user, self._group, layers, saved, plain=plain)
        for path in self._told.get("POINTS", "").splitlines():
            make_point(f"{self._space}/root", path, self._user, self._group)

    def _drop_rights(self) -> None:
        """Rights in a separate user namespace end with `exec`, since its user is not root."""
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
        """Unlike root, others must first give up gaining rights, which rules out newuidmap."""
        if "FILTER" not in self._told or not SECCOMP:
            return
        if not self._root:
            call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        set_filter(bytes.fromhex(self._told["FILTER"]))


def send_listeners(fd: int, ports: "list[int]") -> None:
    """Send the host sockets that listen here: a socket belongs to the network it was made in, whoever holds it."""
    import socket  # takes half as long as all the rest, and few sandboxes need it

    servers = [socket.create_server(("127.0.0.1", port), backlog=BACKLOG) for port in ports]
    with socket.socket(fileno=fd) as channel:
        socket.send_fds(channel, [b"listeners"], [server.fileno() for server in servers])
    for server in servers:
        server.close()


def launch(environ: "Mapping[str, str]", arguments: "list[str]") -> str:
    """Launch the sandbox in this process; return one line on why if that fails."""

    def pick(prefix: str) -> "dict[str, str]":
        return {name[len(prefix) :]: value for name, value in environ.items() if name.startswith(prefix)}

    told = pick(PREFIX)
    try:
        ApptainerLaunch(told).run()
        if "DIRECT" in told:
            command = ContainerCommand(arguments, told["DIRECT"])
            run_container(told["SPACE"], command, pick(INSIDE), pick(FILE), told.get("ORIGINAL"))
        rest = {name: value for name, value in environ.items() if not name.startswith(PREFIX)}
        os.execve(arguments[0], arguments, rest)  # noqa: S606  there is no shell
    except OSError as error:
        return f"launch: {error}\n"


def main() -> None:
    sys.exit(launch(os.environ, sys.argv[1:]).rstrip())
