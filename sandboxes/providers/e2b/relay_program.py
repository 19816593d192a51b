"""Carry the streams of a control shell and its programs between a sandbox and the service, over one pair of streams.

The program is given to the sandbox as text, so it uses nothing newer than version 3.6 of the language. `BOOT` reads it
from standard input, with the control shell's text after it. After that, standard input has frames; standard output has
them as lines of base64, because E2B's client decodes it as text.

A channel is a program's four pipes, or one connection. Whoever sends on a channel may be `WINDOW` bytes ahead of what
the other side has taken, so a stream that nobody reads holds up no other channel. What a program wrote before its end
is sent before the end.

Everything started here stays below this process, also what leaves its session, so `end` finds it; the end of standard
input ends it too. If root runs this, programs run as `user` without any rights, and can neither end nor trace it.
"""

# pathlib takes longer to import than all of this to run, and has no use here.
# ruff: noqa: PTH101, PTH102, PTH103, PTH108, PTH112, PTH114, PTH123, PTH208

import array
import base64
import ctypes
import fcntl
import json
import os
import pwd
import select
import shutil
import signal
import socket
import struct
import sys
import termios
import time
from collections import deque
from contextlib import suppress
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

BOOT = (
    "import os, sys; text, program, control = b'', int(sys.argv[1]), int(sys.argv[2])\n"
    "while len(text) < program + control: text += os.read(0, program + control - len(text))\n"
    "exec(text[:program]); main(text[program:], *sys.argv[3:])"
)
MARK = "--- relay ---"
"""Comes before the first frames: a template's profile may print something, too."""
HEADER = struct.Struct("!cII")
"""Kind, channel, and length of the content."""
HELLO, OPEN, CONNECT, DATA, END, TAKEN, CLOSE, FILE, ASK = (bytes([letter]) for letter in b"hopdetxfa")
NUMBER = struct.Struct("!I")
IN, OUT, ERR, STATUS = range(4)
"""A connection has the first two. Data and ends begin with their stream."""
NAMES = ("in", "out", "err", "st")
CONTROL = 0
INSIDE_FIRST = 1 << 31
MOST_CONNECTIONS = 64
"""To the owner, at once; others wait."""
WINDOW = 256 * 1024
MOST_PIPE = 1024 * 1024
"""A pipe holds no more, unless root inside allows it."""
READ_SIZE = 64 * 1024
LINE_SIZE = 256 * 1024
END_SECONDS = 10.0
POLL_SECONDS = 1.0
CLOCK_BOOTTIME = 7
PR_SET_CHILD_SUBREAPER = 36
GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL
FLAGS = os.O_NONBLOCK | os.O_CLOEXEC


class LinkChannel:
    """`reads` has streams by descriptor, `writes` descriptors by stream.

    `paths` are the names of a program's pipes until it has opened them; a connection has none, not even an empty list.
    """

    def __init__(
        self, number: int, reads: "dict[int, int]", writes: "dict[int, int]", paths: "list[str] | None" = None
    ) -> None:
        self.number = number
        self.reads = reads
        self.writes = writes
        self.is_program = paths is not None
        self.paths = paths or []
        self.pending = deque()  # type: deque[tuple[int, bytearray | None]]
        self.ahead = 0
        self.room = WINDOW

    def mark_opened(self) -> None:
        """Remove the pipes' names; from now on, the input sees its reader close."""
        if self.paths and IN in self.writes:
            both = self.writes.pop(IN)
            with suppress(OSError):  # its reader has already gone
                self.writes[IN] = os.open(f"/proc/self/fd/{both}", os.O_WRONLY | FLAGS)
            os.close(both)
        self.unlink()

    def unlink(self) -> None:
        """Idempotent."""
        while self.paths:
            with suppress(OSError):
                os.unlink(self.paths.pop())

    def end(self, stream: int) -> None:
        """Write nothing more to a stream. Idempotent."""
        if stream in self.writes:
            descriptor = self.writes.pop(stream)
            if not self.is_program:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                    connection.shutdown(socket.SHUT_WR)
            os.close(descriptor)

    @property
    def has_ended(self) -> bool:
        """Nothing comes any more: the output of a program, or anything on a connection."""
        streams = {*self.reads.values(), *self.writes}
        return streams <= {IN} if self.is_program else not streams

    def close(self) -> None:
        """Idempotent."""
        self.unlink()
        for stream in list(self.writes):
            self.end(stream)
        while self.reads:
            os.close(self.reads.popitem()[0])


def connected(number: int, connection: socket.socket, reads: int, writes: int) -> LinkChannel:
    """Make a channel that closes the connection."""
    connection.setblocking(False)
    descriptor = connection.detach()
    return LinkChannel(number, {descriptor: reads}, {writes: os.dup(descriptor)})


def count_pending(descriptor: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count[0]


class Carrier:
    def __init__(self) -> None:
        self.channels = {}  # type: dict[int, LinkChannel]
        self.outgoing = bytearray()
        self.incoming = b""

    def send(self, kind: bytes, number: int, content: bytes = b"") -> None:
        self.outgoing += HEADER.pack(kind, number, len(content)) + content

    def wait(self, handles: "dict[int, Callable[[int], object]]", seconds: "float | None" = None) -> None:
        """Read or write once that is possible; `handles` are of descriptors besides channels'."""
        poller, actions = select.poll(), dict(handles)
        for descriptor in handles:
            poller.register(descriptor, select.POLLIN)
        for channel in self.channels.values():
            for descriptor in channel.reads if channel.room > 0 else ():
                poller.register(descriptor, select.POLLIN)
                actions[descriptor] = partial(self.read, channel, descriptor)
            for stream, descriptor in channel.writes.items():
                is_first = channel.pending and channel.pending[0][0] == stream
                poller.register(descriptor, select.POLLOUT if is_first else 0)
                actions[descriptor] = partial(self.write, channel, stream)
        for descriptor, event in poller.poll(None if seconds is None else seconds * 1000):
            actions[descriptor](event)
        for channel in [channel for channel in self.channels.values() if channel.has_ended]:
            self.close_channel(channel)

    def close_channel(self, channel: LinkChannel) -> None:
        """Close a channel whose ends of streams have been sent."""
        del self.channels[channel.number]
        channel.close()

    def read(self, channel: LinkChannel, descriptor: int, _: int) -> None:
        """Pass on a stream; the status comes after what the program wrote before."""
        stream = channel.reads.get(descriptor)
        for other in list(channel.reads) if stream == STATUS else ():
            left = count_pending(other) if other != descriptor else 0
            while left > 0:
                left -= self.pass_on(channel, other) or left
        if stream is not None and self.pass_on(channel, descriptor) and stream == STATUS:
            channel.mark_opened()

    def pass_on(self, channel: LinkChannel, descriptor: int) -> int:
        """Return how many bytes were read and sent."""
        try:
            data = os.read(descriptor, READ_SIZE)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        stream = bytes([channel.reads[descriptor]])
        channel.room -= len(data)
        self.send(DATA if data else END, channel.number, stream + data)
        if not data:
            del channel.reads[descriptor]
            os.close(descriptor)
        return len(data)

    def write(self, channel: LinkChannel, stream: int, event: int) -> None:
        """Write what the other end takes, or note that it has gone."""
        data = channel.pending[0][1] if channel.pending else None
        if event & GONE:
            channel.end(stream)
        elif data and stream in channel.writes:
            try:
                taken = os.write(channel.writes[stream], data)
            except BlockingIOError:
                return
            except OSError:
                taken = 0
                channel.end(stream)
            del data[:taken]
            self.take(channel, taken)
        self.settle(channel)

    def settle(self, channel: LinkChannel) -> None:
        """Drop what was or cannot be written, and carry out ends."""
        while channel.pending:
            stream, data = channel.pending[0]
            if data and stream in channel.writes:
                return
            channel.pending.popleft()
            self.take(channel, len(data or b""))
            if data is None:
                channel.end(stream)

    def take(self, channel: LinkChannel, count: int) -> None:
        channel.ahead -= count
        if count:
            self.send(TAKEN, channel.number, NUMBER.pack(count))

    def feed(self, data: bytes) -> None:
        """Obey all whole frames."""
        self.incoming += data
        at = 0
        while len(self.incoming) - at >= HEADER.size:
            kind, number, length = HEADER.unpack_from(self.incoming, at)
            end = at + HEADER.size + length
            if len(self.incoming) < end:
                break
            self.obey(kind, number, self.incoming[at + HEADER.size : end])
            at = end
        self.incoming = self.incoming[at:]

    def obey(self, kind: bytes, number: int, content: bytes) -> None:
        """Obey a frame. One for a closed channel is late, and is dropped."""
        channel = self.channels.get(number)
        if channel is None:
            return
        if kind == DATA:
            channel.ahead += len(content) - 1
            last, data = channel.pending[-1] if channel.pending else (content[0], None)
            if data is None or last != content[0]:
                channel.pending.append((content[0], bytearray(content[1:])))
            else:  # small pieces would take a hundred times their size each
                data += content[1:]
        elif kind == END:
            channel.pending.append((content[0], None))
        elif kind == TAKEN:
            channel.room += NUMBER.unpack(content)[0]
        elif kind == CLOSE:
            self.channels.pop(number).close()
        self.settle(channel)


class Relay(Carrier):
    def __init__(self, control: bytes, folder: str, workdir: str, user: str, port: int) -> None:
        super().__init__()
        self.pipes, self.sockets = folder + "/pipes", folder + "/sockets"
        self.next = INSIDE_FIRST
        prefix, ids, home = find_user(user)
        for path, mode in ((folder, 0o711), (self.pipes, 0o711), (self.sockets, 0o700)):
            os.mkdir(path)
            os.chmod(path, mode)
        if not os.path.isdir(workdir):
            os.makedirs(workdir)
            os.chown(workdir, *ids)
        os.chown(self.sockets, *ids)
        self.listener = None  # type: socket.socket | None
        self.has_input = True
        if port:
            self.listener = socket.socket()
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.listener.bind(("127.0.0.1", port))
            self.listener.listen(MOST_CONNECTIONS)
        self.put("control.sh", control)
        ours, theirs = socket.socketpair()
        self.shell = self.start_shell(theirs, workdir, home)
        theirs.close()
        self.channels[CONTROL] = connected(CONTROL, ours, OUT, IN)
        ticks = int(time.clock_gettime(CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
        self.send(HELLO, 0, json.dumps({"ticks": ticks, "prefix": prefix, "home": home}).encode())

    def start_shell(self, channel: socket.socket, workdir: str, home: str) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(channel.fileno(), 0)
                os.dup2(2, 1)
                os.setsid()
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which this program ignores
                os.environ["HOME"] = home
                script = self.pipes + "/control.sh"
                os.execvp("bash", ["bash", "--norc", script, self.pipes, workdir, "0", "0"])  # noqa: S606
            finally:
                os._exit(127)
        return pid

    def run(self) -> None:
        """Carry until standard input or the control shell ends."""
        while self.has_input and CONTROL in self.channels:
            self.reap()
            handles = {0: self.read_frames}  # type: dict[int, Callable[[int], object]]
            if self.listener and sum(number >= INSIDE_FIRST for number in self.channels) < MOST_CONNECTIONS:
                handles[self.listener.fileno()] = partial(self.accept, self.listener)
            while self.outgoing:
                line = base64.b64encode(self.outgoing[:LINE_SIZE]) + b"\n"
                del self.outgoing[:LINE_SIZE]
                while line:
                    line = line[os.write(1, line) :]
            self.wait(handles, POLL_SECONDS)

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def read_frames(self, _: int) -> None:
        """Obey frames; the end of standard input ends everything."""
        data = os.read(0, LINE_SIZE)
        self.feed(data)
        self.has_input = bool(data)

    def accept(self, listener: socket.socket, _: int) -> None:
        self.channels[self.next] = connected(self.next, listener.accept()[0], OUT, IN)
        self.send(CONNECT, self.next)
        self.next += 1

    def obey(self, kind: bytes, number: int, content: bytes) -> None:
        if kind == ASK:
            self.send(ASK, number, json.dumps(self.end()).encode())
        elif kind == FILE:
            name, _, text = content.partition(b"\0")
            self.put(name.decode(), text)
        elif kind == OPEN:
            self.open(number, content.decode())
        elif kind == CONNECT:
            connection, path = socket.socket(socket.AF_UNIX), self.sockets + "/" + content.decode()
            connection.setblocking(False)  # code inside may let nobody accept
            if os.path.islink(path) or connection.connect_ex(path):
                self.send(CLOSE, number)
            else:
                self.channels[number] = connected(number, connection, OUT, IN)
        else:
            super().obey(kind, number, content)

    def open(self, number: int, token: str) -> None:
        paths = [f"{self.pipes}/{token}.{name}" for name in NAMES]
        for path in paths:
            os.mkfifo(path)
            os.chmod(path, 0o666)  # noqa: S103  its name is a secret
        source, *sinks = [os.open(path, FLAGS | (0 if at else os.O_RDWR)) for at, path in enumerate(paths)]
        reads = {sink: stream for stream, sink in enumerate(sinks, OUT)}
        self.channels[number] = LinkChannel(number, reads, {IN: source}, paths)

    def put(self, name: str, content: bytes) -> None:
        path = self.pipes + "/" + name
        with open(path, "wb") as file:
            file.write(content)
        os.chmod(path, 0o644)

    def end(self) -> bool:
        """End processes below this one but the control shell; return whether there were any."""
        had = False
        until = time.monotonic() + END_SECONDS
        while time.monotonic() < until:
            found = [pid for pid in descendants(os.getpid()) if pid != self.shell]
            if not found:
                return had
            had = True
            for pid in found:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()
            time.sleep(0.01)
        return True


def descendants(of: int) -> "list[int]":
    """Leave zombies out."""
    parents = {}
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as file:
            state, parent = file.read().rpartition(b") ")[2].split()[:2]
            if state != b"Z":
                parents[int(name)] = int(parent)
    found = []
    for pid in parents:
        at = parents[pid]
        while at in parents and at != of:
            at = parents[at]
        if at == of:
            found.append(pid)
    return found


def find_user(name: str) -> "tuple[list[str], tuple[int, int], str]":
    """Return the command that drops root's rights, the programs' ids, and their home."""
    if os.geteuid() != 0 or name == "root":
        return [], (os.geteuid(), os.getegid()), os.environ.get("HOME", "/")
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        sys.exit(f"the template has no user {name!r}")
    if shutil.which("setpriv") is None:
        sys.exit("the template has no setpriv, which drops root's rights")
    ids = ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--init-groups"]
    rights = ["--no-new-privs", "--inh-caps", "-all", "--bounding-set", "-all"]
    return ["setpriv", *ids, *rights, "--"], (user.pw_uid, user.pw_gid), user.pw_dir


def main(control: bytes, folder: str, workdir: str, user: str, port: str) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    relay = Relay(control, folder, workdir, user, int(port))
    os.write(1, f"\n{MARK}\n".encode())
    try:
        relay.run()
    finally:
        with suppress(OSError):
            os.kill(relay.shell, signal.SIGKILL)
        relay.end()
        shutil.rmtree(folder, ignore_errors=True)
