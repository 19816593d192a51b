"""A launch confines a sandbox: system calls, keyrings, mount points, and shared resources."""

import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from rollout_service.cli.doctor.checks import check_sharing
from rollout_service.settings import Settings
from sandboxes import ApptainerConfig, LocalConfig, SandboxStartError
from sandboxes.host.kernel_calls import KEYCTL, find_inside
from sandboxes.providers.apptainer import seccomp
from sandboxes.providers.apptainer.launch.files import make_point
from sandboxes.providers.apptainer.launcher import Launcher
from sandboxes.providers.apptainer.sharing import read_sharing

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
        "import ctypes, os, sys; from sandboxes.host.kernel_calls import set_filter, call; "
        "call('prctl', 38, 1, 0, 0, 0); "
        "set_filter(bytes.fromhex(sys.argv[1])); import socket; socket.socket(40, 1)"
    )
    program = seccomp.build_program()
    done = subprocess.run([sys.executable, "-c", code, program.hex()], capture_output=True, text=True, check=False)
    assert "Address family not supported" in done.stderr, done.stderr


PRELUDE = "import ctypes, os, sys\ncall = ctypes.CDLL(None, use_errno=True).syscall\n"
SERVICE = f"""{PRELUDE}
keyctl, add_key, *launched = sys.argv[1:]
call(int(keyctl), 1, None)
if call(int(add_key), b"user", b"rollout-test", b"secret", 6, -3) < 0:
    sys.exit("a host without keys")
os.execv(sys.executable, [sys.executable, *launched])
"""
INSIDE = f"{PRELUDE}print(call(int(sys.argv[1]), 10, -3, b'user', b'rollout-test', 0) > 0)"


@pytest.mark.parametrize("through", ["the launcher", "nothing"])
def test_a_sandbox_finds_no_key_of_its_service(tmp_path, through):
    keyctl, add_key = str(KEYCTL), str(KEYCTL - 2)
    script = Launcher.make_command([sys.executable])[1:] if through == "the launcher" else []
    command = [sys.executable, "-c", SERVICE, keyctl, add_key, *script, "-c", INSIDE, keyctl]
    done = subprocess.run(
        command,
        env={"LAUNCH_SPACE": str(tmp_path), "LAUNCH_BYTES": "1048576"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ("False\n" if script else "True\n"), done


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image whose links lead to its own folders, to nowhere, and up; `outside` lies next to it."""
    (tmp_path / "outside").mkdir()
    image = tmp_path / "image"
    (image / "etc").mkdir(parents=True)
    (image / "run").mkdir()
    (image / "var").mkdir()
    (image / "var/run").symlink_to("/run")
    (image / "etc/resolv.conf").symlink_to("../run/resolver/stub.conf")
    (image / "up").symlink_to("../../../../outside")
    (image / "host").symlink_to(tmp_path / "outside")
    (image / "loop").symlink_to("loop")
    return image


def make(image: Path, path: str) -> None:
    make_point(str(image), path, os.geteuid(), os.getegid())


def test_links_are_followed_inside(image):
    make(image, "/var/run/pipes/")
    assert (image / "run/pipes").is_dir()
    make(image, "/etc/resolv.conf")
    assert (image / "run/resolver/stub.conf").read_bytes() == b""
    assert (image / "etc/resolv.conf").is_symlink()


@pytest.mark.parametrize("path", ["/up/new/", "/host/new", "/../outside/new/", "/up/../../outside/new"])
def test_nothing_is_made_outside(image, path):
    make(image, path)
    assert list((image.parent / "outside").iterdir()) == []
    assert sorted(found.name for found in image.parent.iterdir()) == ["image", "outside"]
    found = Path(find_inside(str(image), path))
    assert found.is_relative_to(image)
    assert found.is_dir() == path.endswith("/")


def test_what_exists_is_left_as_it_is(image):
    (image / "etc/hosts").write_text("::1 localhost\n")
    (image / "run").chmod(0o700)
    make(image, "/etc/hosts")
    make(image, "/run/")
    assert (image / "etc/hosts").read_text() == "::1 localhost\n"
    assert (image / "run").stat().st_mode & 0o777 == 0o700


def test_a_loop_of_links_is_an_error(image):
    with pytest.raises(OSError, match="loop"):
        make(image, "/loop/new/")


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    numbers = {
        "fs/epoll/max_user_watches": 5_000_000,
        "fs/inotify/max_user_instances": 128,
        "kernel/pty/max": 4096,
        "kernel/pty/reserve": 1024,
    }
    for path, number in numbers.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{number}\n")
    return tmp_path


def test_it_is_read_from_the_kernel(kernel):
    found = read_sharing(ApptainerConfig(user_range="none"), kernel)
    assert not found.own_users
    assert not found.filtered, "this kernel names no actions"
    assert found.counts == {"epoll watches": 5_000_000, "inotify instances": 128}
    assert found.own_terminals in {48, None}


def test_users_are_separate_if_the_service_is_root_and_configured_so():
    assert read_sharing(ApptainerConfig()).own_users == (os.geteuid() == 0)
    assert not read_sharing(ApptainerConfig(user_range="none")).own_users


def test_doctor_names_what_can_be_used_up_and_how_to_prevent_it(tmp_path):
    settings = Settings(sandbox=ApptainerConfig(user_range="none"), state_dir=tmp_path)
    checks = {check.name: check for check in check_sharing(settings)}
    users = checks["users of sandboxes"]
    assert users.state == "limited"
    assert "epoll watches (" in users.found
    assert ("user_range" if os.geteuid() == 0 else "as root") in users.fix
    assert checks["system calls of sandboxes"].state == "ok"
    assert checks["terminals of sandboxes"].found
    assert list(check_sharing(Settings(sandbox=LocalConfig(provider="local"), state_dir=tmp_path))) == []


def test_a_busy_host_is_asked_again(monkeypatch):
    launcher = Launcher(os.geteuid(), os.getegid())
    with monkeypatch.context() as patched:
        patched.setattr("sandboxes.providers.apptainer.launcher.PROBE_SECONDS", 0.0)
        with pytest.raises(SandboxStartError, match="a trial launch took more"):
            _ = launcher.namespaces
    assert launcher.namespaces in {True, False}
