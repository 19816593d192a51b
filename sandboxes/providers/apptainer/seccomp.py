"""The system calls that nothing in a sandbox may make, as a classic BPF program that `launch` installs.

The kernel runs the program for each call of every process inside, and no process can remove it. It refuses:

- all sockets except Unix, IPv4, IPv6 and netlink: VSOCK has no network namespaces and reaches the host;
- resources shared with neighbors by user or host: keys, `userfaultfd`, io_uring and the older asynchronous I/O, whose
  65,536 requests all processes of the host share, BPF, performance counters, fanotify;
- changes to process 1, the control shell: its limits, priority and processors;
- calls of other architectures, whose numbers have other meanings.

`sync` succeeds at once: a sandbox's files are in memory, and the host's disks do not concern it. The kernel's own rules
govern tracing of child processes, namespaces and mounts; Apptainer needs the latter two.
"""

import errno
import json
import platform
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from socket import AF_INET, AF_INET6, AF_NETLINK, AF_UNIX

# From linux/bpf_common.h, linux/seccomp.h and linux/audit.h.
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
X32_BIT = 0x40000000
"""Marks calls in x86_64's other table, which some kernels still accept."""

PRIO_USER, IOPRIO_WHO_USER = 2, 3
ITSELF, FIRST_PROCESS = 0, 1
FAMILIES = (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)


@dataclass(frozen=True, slots=True)
class Condition:
    """An argument is among these 32-bit numbers, or is not."""

    argument: int
    values: tuple[int, ...]
    among: bool = True


@dataclass(frozen=True, slots=True)
class Given:
    """A pointer argument is not null."""

    argument: int


@dataclass(frozen=True, slots=True)
class SyscallRule:
    """The call fails if all conditions hold; without conditions it always fails."""

    name: str
    error: int
    conditions: tuple[Condition | Given, ...] = ()


def _refuse(error: int, *names: str) -> tuple[SyscallRule, ...]:
    return tuple(SyscallRule(name, error) for name in names)


RULES: tuple[SyscallRule, ...] = (
    SyscallRule("socket", errno.EAFNOSUPPORT, (Condition(0, FAMILIES, among=False),)),
    SyscallRule("socketpair", errno.EAFNOSUPPORT, (Condition(0, FAMILIES, among=False),)),
    SyscallRule("prlimit64", errno.EPERM, (Condition(0, (ITSELF,), among=False), Given(2))),
    # Only process 1 is protected: libraries name their own threads by number here.
    SyscallRule("sched_setaffinity", errno.EPERM, (Condition(0, (FIRST_PROCESS,)),)),
    SyscallRule("sched_setattr", errno.EPERM, (Condition(0, (FIRST_PROCESS,)),)),
    SyscallRule("sched_setparam", errno.EPERM, (Condition(0, (FIRST_PROCESS,)),)),
    SyscallRule("sched_setscheduler", errno.EPERM, (Condition(0, (FIRST_PROCESS,)),)),
    SyscallRule("setpriority", errno.EPERM, (Condition(1, (FIRST_PROCESS,)),)),
    SyscallRule("setpriority", errno.EPERM, (Condition(0, (PRIO_USER,)),)),
    SyscallRule("ioprio_set", errno.EPERM, (Condition(1, (FIRST_PROCESS,)),)),
    SyscallRule("ioprio_set", errno.EPERM, (Condition(0, (IOPRIO_WHO_USER,)),)),
    *_refuse(errno.ENOSYS, "io_uring_setup", "io_uring_enter", "io_uring_register", "io_setup", "memfd_secret"),
    *_refuse(errno.EPERM, "add_key", "request_key", "keyctl", "userfaultfd", "bpf", "perf_event_open"),
    *_refuse(errno.EPERM, "fanotify_init", "open_by_handle_at", "lookup_dcookie", "quotactl", "quotactl_fd"),
    *_refuse(errno.EPERM, "move_pages", "migrate_pages", "syslog", "acct", "vhangup", "reboot"),
    *_refuse(errno.EPERM, "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module"),
    *_refuse(errno.EPERM, "swapon", "swapoff", "settimeofday", "clock_settime", "iopl", "ioperm"),
    *_refuse(0, "sync", "syncfs"),
)


@dataclass(frozen=True, slots=True)
class Architecture:
    audit: int
    numbers: Mapping[str, int]
    x32: bool = False


# From asm/unistd_64.h and asm-generic/unistd.h; numbers above 423 are the same everywhere.
_COMMON = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "quotactl_fd": 443,
    "memfd_secret": 447,
}
_X86_64 = Architecture(
    0xC000003E,
    _COMMON
    | {"socket": 41, "socketpair": 53, "syslog": 103, "setpriority": 141, "sched_setparam": 142}
    | {"sched_setscheduler": 144, "vhangup": 153, "sync": 162, "acct": 163, "settimeofday": 164}
    | {"swapon": 167, "swapoff": 168, "reboot": 169, "iopl": 172, "ioperm": 173, "init_module": 175}
    | {"delete_module": 176, "quotactl": 179, "sched_setaffinity": 203, "io_setup": 206, "lookup_dcookie": 212}
    | {"clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250}
    | {"ioprio_set": 251, "migrate_pages": 256, "move_pages": 279, "perf_event_open": 298}
    | {"fanotify_init": 300, "prlimit64": 302, "open_by_handle_at": 304, "syncfs": 306, "finit_module": 313}
    | {"sched_setattr": 314, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323},
    x32=True,
)
_AARCH64 = Architecture(
    0xC00000B7,
    _COMMON
    | {"io_setup": 0, "lookup_dcookie": 18, "ioprio_set": 30, "vhangup": 58, "quotactl": 60, "sync": 81, "acct": 89}
    | {"kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116}
    | {"sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "setpriority": 140}
    | {"reboot": 142, "settimeofday": 170, "socket": 198, "socketpair": 199, "add_key": 217}
    | {"request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "migrate_pages": 238}
    | {"move_pages": 239, "perf_event_open": 241, "prlimit64": 261, "fanotify_init": 262}
    | {"open_by_handle_at": 265, "syncfs": 267, "finit_module": 273, "sched_setattr": 274, "bpf": 280}
    | {"userfaultfd": 282, "kexec_file_load": 294},
)
ARCHITECTURES = {"x86_64": _X86_64, "aarch64": _AARCH64}


@cache
def build_program(machine: str = "") -> bytes | None:
    """Return the program for a machine, by default this one, or None if its calls are not known."""
    architecture = ARCHITECTURES.get(machine or platform.machine())
    return None if architecture is None else b"".join(assemble(architecture))


@cache
def build_profile() -> str:
    """Return nearly the same rules as an OCI runtime profile for Apptainer, whose only error is EPERM."""
    calls = [
        {"names": [rule.name], "action": "SCMP_ACT_ERRNO", "args": arguments}
        for rule in RULES
        if rule.error
        for arguments in _combinations(rule.conditions)
    ]
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": calls})


def _combinations(conditions: Sequence[Condition | Given]) -> Iterator[list[dict[str, object]]]:
    """Yield alternatives, each of which must hold as a whole: libseccomp compares an argument once."""
    yield from map(list, product(*(_comparisons(condition) for condition in conditions)))


def _comparisons(condition: Condition | Given) -> list[dict[str, object]]:
    at = condition.argument
    if isinstance(condition, Given):
        return [{"index": at, "value": 0, "op": "SCMP_CMP_NE"}]
    if condition.among:
        return [{"index": at, "value": value, "op": "SCMP_CMP_EQ"} for value in condition.values]
    # Match the numbers between and above those that are allowed.
    *others, most = sorted(condition.values)
    between = [value for value in range(most) if value not in others]
    return [
        *({"index": at, "value": value, "op": "SCMP_CMP_EQ"} for value in between),
        {"index": at, "value": most, "op": "SCMP_CMP_GT"},
    ]


def assemble(architecture: Architecture) -> list[bytes]:
    found = [
        _instruction(LOAD, ARCHITECTURE_AT),
        _instruction(EQUAL, architecture.audit, if_true=1),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER_AT),
    ]
    if architecture.x32:
        found += [
            _instruction(ANY_BIT, X32_BIT, if_false=1),
            _instruction(RETURN, ERRNO | errno.ENOSYS),
        ]
    for rule in RULES:
        if (number := architecture.numbers.get(rule.name)) is not None:
            found += _assemble_rule(number, rule)
    return [*found, _instruction(RETURN, ALLOW)]


def _assemble_rule(number: int, rule: SyscallRule) -> list[bytes]:
    """Skip other calls, and leave the number loaded for the next rule."""
    refusal = _instruction(RETURN, ERRNO | rule.error)
    if not rule.conditions:
        return [_instruction(EQUAL, number, if_false=1), refusal]
    body: list[bytes] = [refusal]
    for condition in reversed(rule.conditions):
        body = _assemble_condition(condition, len(body)) + body
    body.append(_instruction(LOAD, NUMBER_AT))
    return [_instruction(EQUAL, number, if_false=len(body)), *body]


def _assemble_condition(condition: Condition | Given, rest: int) -> list[bytes]:
    """Fall through to the next `rest` instructions if the condition holds, else jump over them."""
    at = ARGUMENTS_AT + 8 * condition.argument
    if isinstance(condition, Given):
        return [
            _instruction(LOAD, at),
            _instruction(EQUAL, 0, if_false=2),
            _instruction(LOAD, at + 4),
            _instruction(EQUAL, 0, if_true=rest),
        ]
    found = [_instruction(LOAD, at)]
    for left in reversed(range(len(condition.values))):
        value = condition.values[-1 - left]
        if not condition.among:
            found.append(_instruction(EQUAL, value, if_true=left + rest))
        else:
            found.append(_instruction(EQUAL, value, if_true=left, if_false=0 if left else rest))
    return found


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
