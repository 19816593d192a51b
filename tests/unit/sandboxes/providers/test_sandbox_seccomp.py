"""The system call filter, run as the kernel runs it, gives the right verdicts on both supported machines."""

import errno
import json
import struct
import subprocess
import sys

import pytest

from sandboxes.providers.apptainer import seccomp

ALLOWED, KILLED = 0x7FFF0000, 0x80000000


def verdict(machine: str, name: str | int, *arguments: int, audit: int | None = None) -> int:
    """Return the program's answer: 0x7fff0000, an error, or the end of the process."""
    architecture = seccomp.ARCHITECTURES[machine]
    number = name if isinstance(name, int) else architecture.numbers[name]
    values = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("=IIQ6Q", number, audit or architecture.audit, 0, *values)
    program = seccomp.build_program(machine)
    assert program is not None
    code = list(struct.iter_unpack("=HBBI", program))
    at = held = 0
    while True:
        operation, if_true, if_false, value = code[at]
        at += 1
        if operation == seccomp.LOAD:
            [held] = struct.unpack_from("=I", data, value)
        elif operation == seccomp.RETURN:
            return int(value)
        else:
            met = held == value if operation == seccomp.EQUAL else held & value != 0
            at += if_true if met else if_false


def error(number: int) -> int:
    return 0x00050000 | number


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_some_calls_are_refused_and_others_allowed(machine):
    for family in range(64):
        for name in ("socket", "socketpair"):
            allowed = ALLOWED if family in {1, 2, 10, 16} else error(errno.EAFNOSUPPORT)
            assert verdict(machine, name, family, 1) == allowed
    assert verdict(machine, "keyctl", 0) == error(errno.EPERM)
    assert verdict(machine, "io_uring_setup", 8) == error(errno.ENOSYS)
    assert verdict(machine, "sync") == error(0)
    assert verdict(machine, 39) == ALLOWED
    assert verdict(machine, "socket", 1, audit=0x40000003) == KILLED


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_own_limits_and_priorities_can_change_but_not_those_of_process_1(machine):
    pointer = 0x7F00_0000_0000  # its lower half is 0
    assert verdict(machine, "prlimit64", 0, 7, pointer) == ALLOWED
    assert verdict(machine, "prlimit64", 1, 7, 0, pointer) == ALLOWED
    for other in (1, 1234):
        assert verdict(machine, "prlimit64", other, 7, pointer) == error(errno.EPERM)
        assert verdict(machine, "prlimit64", other, 7, 16) == error(errno.EPERM)
    for name in ("sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler"):
        assert verdict(machine, name, 1) == error(errno.EPERM)
        assert verdict(machine, name, 0) == verdict(machine, name, 1234) == ALLOWED
    for name, user in (("setpriority", 2), ("ioprio_set", 3)):
        assert verdict(machine, name, 0, 1) == verdict(machine, name, user, 0) == error(errno.EPERM)
        assert verdict(machine, name, 0, 0) == verdict(machine, name, 1, 1234) == ALLOWED


def test_the_other_table_of_x86_64_is_refused():
    assert verdict("x86_64", 0x40000000 | 41, 1) == error(errno.ENOSYS)
    assert verdict("aarch64", 0x40000000 | 41, 1) == ALLOWED  # no such bit there, and no such call


def test_every_rule_has_a_number():
    names = {rule.name for rule in seccomp.RULES}
    assert names == set(seccomp.ARCHITECTURES["x86_64"].numbers)
    assert names - {"iopl", "ioperm"} == set(seccomp.ARCHITECTURES["aarch64"].numbers)
    assert seccomp.build_program("riscv64") is None


def test_the_profile_says_the_same_of_families():
    """libseccomp refuses a call if all arguments of one entry match."""
    matches = {"SCMP_CMP_EQ": int.__eq__, "SCMP_CMP_NE": int.__ne__, "SCMP_CMP_GT": int.__gt__}
    calls = json.loads(seccomp.build_profile())["syscalls"]

    def refused(name: str, *arguments: int) -> bool:
        return any(
            all(matches[one["op"]](arguments[one["index"]], one["value"]) for one in entry["args"])
            for entry in calls
            if entry["names"] == [name]
        )

    assert [family for family in range(64) if not refused("socket", family)] == [1, 2, 10, 16]
    assert refused("prlimit64", 1, 7, 16)
    assert not refused("prlimit64", 0, 7, 16)
    assert not refused("prlimit64", 1, 7, 0)
    assert refused("keyctl")


def test_the_kernel_takes_the_program():
    code = (
        "import ctypes, os, sys; from sandboxes.providers.apptainer.launch import set_filter, call; "
        "call('prctl', 38, 1, 0, 0, 0); "
        "set_filter(bytes.fromhex(sys.argv[1])); import socket; socket.socket(40, 1)"
    )
    program = seccomp.build_program()
    assert program is not None
    done = subprocess.run(
        [sys.executable, "-c", code, program.hex()], capture_output=True, text=True, check=False
    )
    assert "Address family not supported" in done.stderr, done.stderr
