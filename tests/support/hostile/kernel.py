"""Attacks on what sandboxes share through the kernel: system calls, keys, process 1, terminals, descriptors.

They are on the list of `tests.support.hostile`, whose docstring says what a check asserts.
"""

import ctypes
import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from pwd import getpwnam

from sandboxes import Sandbox, SandboxProvider, SandboxSpec
from sandboxes.host.processes import processes_of
from tests.support.hostile.checks import (
    CHECKS,
    PATIENCE,
    NothingToAttackError,
    attacked,
    check,
    limits_of,
    recovers,
    works,
)

LIBRARY = """
import ctypes, errno, os, resource, signal, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return 0 if result >= 0 else ctypes.get_errno()

def refused(what):
    try:
        return what() == -1
    except OSError as error:
        return True
"""

FAMILIES = """
def opens(family):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try:
            socket.socket(family, kind).close()
            return True
        except OSError:
            pass
    return False
print(sorted(family for family in range(64) if opens(family)))
"""

CALLS = {
    "x86_64": {"keyctl": 250, "add_key": 248, "request_key": 249, "userfaultfd": 323, "bpf": 321}
    | {"perf_event_open": 298, "fanotify_init": 300, "syslog": 103, "io_setup": 206},
    "aarch64": {"keyctl": 219, "add_key": 217, "request_key": 218, "userfaultfd": 282, "bpf": 280}
    | {"perf_event_open": 241, "fanotify_init": 262, "syslog": 116, "io_setup": 0},
}[os.uname().machine]
RINGS = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}

OTHER_ENTRY = """
import ctypes, mmap, subprocess, sys
child = '''
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b8140000 00cd80c3".replace(" ", "")))  # mov eax, 20; int 0x80; ret: the getpid of i386
at = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_int)(at)())
'''
print(subprocess.run([sys.executable, "-c", child], capture_output=True).returncode)
"""


async def said_by(sandbox: Sandbox, code: str) -> str:
    """Return the output of a Python program inside, which must succeed."""
    await sandbox.write_file("/tmp/attack.py", LIBRARY + code)
    done = await sandbox.exec(["python3", "/tmp/attack.py"], timeout=PATIENCE)
    assert done.exit_code == 0, done
    return done.stdout.decode().strip()


@check
async def other_socket_families(provider: SandboxProvider) -> None:
    """Only Unix, IPv4, IPv6 and netlink sockets exist: VSOCK would reach the host and every neighbor."""
    async with attacked(provider) as sandbox:
        found = set(map(int, (await said_by(sandbox, FAMILIES)).strip("[]").split(",")))
        assert found <= {1, 2, 10, 16}, found
        assert {1, 2} <= found


@check
async def system_calls_that_nobody_needs(provider: SandboxProvider) -> None:
    """Keys, asynchronous I/O and others are refused before the kernel looks at their arguments."""
    code = f"print([name for name, number in {CALLS | RINGS}.items() if call(number, 0, 0, 0, 0, 0) not in "
    async with attacked(provider) as sandbox:
        assert await said_by(sandbox, code + "{errno.EPERM, errno.ENOSYS}])") == "[]"
        if os.uname().machine == "x86_64":
            assert await said_by(sandbox, "print(call(0x40000000 | 39) == errno.ENOSYS)") == "True"
            # Killed by the filter (SIGSYS), or by a kernel that has no such entry (SIGSEGV).
            assert await said_by(sandbox, OTHER_ENTRY) in {"-31", "-11"}


@check
async def keys_of_the_service(provider: SandboxProvider) -> None:
    """A key in the service's session keyring is out of reach; at most its own user sees its name."""
    name = f"rollout-{secrets.token_hex(4)}"
    if add_key(name) < 0:
        raise NothingToAttackError("a host without keys has none to lose")
    async with attacked(provider) as sandbox:
        if os.geteuid() == 0:
            assert name not in (await sandbox.exec(["cat", "/proc/keys"])).stdout.decode()
        code = f"print(call({CALLS['keyctl']}, 10, -3, 0, 0, 0) != 0)"
        assert await said_by(sandbox, code) == "True"


def add_key(name: str) -> int:
    """Add a key to this process's own session keyring; return a negative number if that fails."""
    libc = ctypes.CDLL(None)
    libc.syscall(CALLS["keyctl"], 1, None)
    return int(libc.syscall(CALLS["add_key"], b"user", name.encode(), b"secret", 6, -3))


PROCESS_1 = """
left = []
for what in range(16):
    now = resource.prlimit(1, what)
    if not refused(lambda: resource.prlimit(1, what, (0, now[1]))):
        left.append(what)
print(left)
attempts = {
    "affinity": lambda: os.sched_setaffinity(1, [0]),
    "scheduler": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    "param": lambda: os.sched_setparam(1, os.sched_param(0)),
    "priority": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    "priority of the group": lambda: os.setpriority(os.PRIO_PGRP, 1, 19),
    "priority of the user": lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19),
    "priority of the own user": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "trace": lambda: libc.ptrace(0x4206, 1, 0, 0),
    "memory": lambda: open("/proc/1/mem", "rb").read(1),
    "score": lambda: open("/proc/1/oom_score_adj", "w").write("1000"),
    "group": lambda: open("/proc/1/autogroup", "w").write("19"),
    "descriptor": lambda: call_or_raise(438, os.pidfd_open(1), 0, 0),
}
def call_or_raise(*arguments):
    if found := call(*arguments):
        raise OSError(found)
print([name for name, attempt in attempts.items() if not refused(attempt)])
for _ in range(3):
    for number in range(1, 65):
        try:
            os.kill(1, number)
        except OSError:
            pass
"""
OWN = """
now = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))
os.sched_setaffinity(os.getpid(), os.sched_getaffinity(0))
os.setpriority(os.PRIO_PROCESS, os.getpid(), 19)
child = os.fork()
if child == 0:
    libc.ptrace(0, 0, 0, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(7)
print(os.WIFSTOPPED(os.waitpid(child, 0)[1]))
libc.ptrace(7, child, 0, 0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@check
async def process_1(provider: SandboxProvider) -> None:
    """Calls that would break the control shell fail or change nothing; on oneself they work, tracing too."""
    async with attacked(provider) as sandbox:
        assert await said_by(sandbox, PROCESS_1) == "[]\n[]"
        for command in (["prlimit", "--pid", "1", "--nproc=1"], ["renice", "-n", "19", "-p", "1"]):
            assert (await sandbox.exec(command)).exit_code != 0, command
        assert await works(sandbox)
        assert (await said_by(sandbox, OWN)).split() == ["True", "7"]
        limited = await (await sandbox.bash()).run("(ulimit -n 64; ulimit -n); ulimit -v; nice -n 5 nice")
        assert limited.output.split()[0] == "64"


PTYS = """
held = []
try:
    for _ in range(5000):
        held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
except OSError:
    pass
print(len(held), flush=True)
"""
TERMINAL = "import os; os.write(os.openpty()[0], b'x'); print('up')"


@check
async def every_terminal(provider: SandboxProvider) -> None:
    """A sandbox that opens all its pseudo-terminals leaves its neighbors theirs."""
    if "disk" not in provider.enforced:
        raise NothingToAttackError("the host lets the service mount nothing")
    async with attacked(provider) as sandbox, await provider.start(SandboxSpec()) as other:
        python = await sandbox.python()
        held = await python.execute(LIBRARY + PTYS, timeout=PATIENCE)
        assert 16 <= int(held.output) <= 64, held
        done = await other.exec(["python3", "-c", TERMINAL], timeout=PATIENCE)
        assert done.stdout == b"up\n", done


LIMITS = """
print([what for what in ("CORE", "RTPRIO", "NICE") if resource.getrlimit(getattr(resource, f"RLIMIT_{what}"))[1]])
held = []
try:
    for _ in range(30000):
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(len(held))
"""


@check
async def limits_of_a_process(provider: SandboxProvider) -> None:
    """It dumps no core, gains no priority, and has descriptors for real work, but not as many as the service."""
    async with attacked(provider) as sandbox:
        forbidden, descriptors = (await said_by(sandbox, LIMITS)).splitlines()
        assert forbidden == "[]"
        assert 1000 <= int(descriptors) < 4096, descriptors


# What the kernel counts by user of the host.


@check
async def users_of_the_host(provider: SandboxProvider) -> None:
    """Each sandbox runs as a separate user without noticing, or the provider does not claim to do so."""
    async with attacked(provider) as sandbox, await provider.start(SandboxSpec()) as other:
        found = [users_of(sandbox), users_of(other)]
        if "users" in provider.enforced:
            assert os.geteuid() == 0
            assert not found[0] & found[1], found
            assert all(min(numbers) > 65_536 for numbers in found), found
        else:
            assert found[0] == found[1], found
        said = await sandbox.exec(["sh", "-c", "id -u; touch /usr/bin/new /root/new && rm /etc/hostname"])
        assert said.exit_code == 0, said
        expected = getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid()
        assert int(said.stdout) == expected


def users_of(sandbox: Sandbox) -> set[int]:
    """Return the host's ids of the users that processes in a sandbox run as."""
    found = set()
    for pid in processes_of({sandbox.id}):
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            found.add(int(status.partition("\nUid:")[2].split()[0]))
    return found


WATCHERS = """
held = []
while (made := libc.inotify_init()) >= 0:
    held.append(made)
print(len(held))
"""
ONE_WATCHER = "import ctypes; print(ctypes.CDLL(None).inotify_init() >= 0)"
IN_FLIGHT = """
import array
held, sent = [], 0
packet = array.array("i", [os.open("/dev/null", os.O_RDONLY)] * 200)
try:
    for _ in range(200):
        pair = socket.socketpair()
        held.append(pair)
        pair[0].setblocking(False)
        try:
            while True:
                pair[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packet)])
                sent += len(packet)
        except BlockingIOError:
            pass
except OSError as error:
    pass
print(sent)
"""
ONE_IN_FLIGHT = """
import array, os, socket
one, other = socket.socketpair()
socket.send_fds(one, [b"x"], [0] * 8)
print(len(socket.recv_fds(other, 1, 8)[1]) == 8)
"""
PIPES = """
import fcntl
held = []
try:
    for _ in range(1500):
        held += os.pipe()
        try:
            fcntl.fcntl(held[-1], 1031, 1 << 20)
        except PermissionError:  # that would be too many; small ones fill the rest
            pass
except OSError:
    pass
print(len(held))
"""
ONE_PIPE = "import fcntl, os; print(fcntl.fcntl(os.pipe()[0], 1032) == 65536)"
EPOLL = """
import select, time
targets = [os.dup(os.pipe()[0]) for _ in range(1000)]
held, count, end = [], 0, time.monotonic() + 2
try:
    while time.monotonic() < end:
        held.append(select.epoll())
        for target in targets:
            held[-1].register(target, select.EPOLLIN)
            count += 1
except OSError:
    pass
print(count)
"""
ONE_EPOLL = "import os, select; select.epoll().register(os.pipe()[0]); print(True)"


SHARED = {
    "every_inotify_instance": (WATCHERS, ONE_WATCHER),  # 128 per user by default
    "every_descriptor_in_flight": (IN_FLIGHT, ONE_IN_FLIGHT),  # as many per user as a process may have
    "every_page_of_pipes": (PIPES, ONE_PIPE),  # beyond 16,384 per user, new pipes are small
    "many_epoll_watches": (EPOLL, ONE_EPOLL),
}


async def uses_up(provider: SandboxProvider, attack: str, one: str) -> None:
    """While a process in one sandbox holds all it can get, another sandbox gets its share."""
    if "users" not in provider.enforced:
        raise NothingToAttackError("the host counts all sandboxes together, as `doctor` says")
    async with attacked(provider) as sandbox, await provider.start(SandboxSpec()) as other:
        await sandbox.write_file("/tmp/attack.py", f"{LIBRARY}{attack}sys.stdout.flush()\nsignal.pause()\n")
        holds = "(python3 /tmp/attack.py >/tmp/held &); until [ -s /tmp/held ]; do sleep 0.05; done; cat /tmp/held"
        result = await (await sandbox.bash()).run(holds, timeout=PATIENCE)
        assert int(result.output) > 0, result
        done = await other.exec(["python3", "-c", one], timeout=PATIENCE)
        assert done.stdout == b"True\n", done


CHECKS.update({name: partial(uses_up, attack=attack, one=one) for name, (attack, one) in SHARED.items()})


ALL_EPOLL = EPOLL.replace("monotonic() + 2", "monotonic() + 60") + "time.sleep(60)\n"


@check
async def every_epoll_watch(provider: SandboxProvider) -> None:
    """If a user is shared, a sandbox is killed long before it has taken all watches, which the service needs too."""
    if "users" in provider.enforced:
        raise NothingToAttackError("no user is shared")
    async with attacked(provider) as sandbox:
        await sandbox.write_file("/tmp/attack.py", LIBRARY + ALL_EPOLL)
        run = "for i in 1 2 3; do python3 /tmp/attack.py & done; wait"
        assert await limits_of(sandbox, run) == {"watches"}
        await recovers(sandbox)
