"""A sandbox that the launcher makes is the same, to the code inside, as the one of Apptainer that it repeats."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import NoReturn

import anyio
import psutil
import pytest

from sandboxes import (
    ApptainerConfig,
    Bind,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    SandboxStartError,
    make_provider,
)
from sandboxes.host.processes import find_first_process
from sandboxes.host.subordinate_ids import resolve_user
from sandboxes.providers.apptainer.fork_server import ForkServer
from sandboxes.providers.apptainer.launcher import Launcher
from sandboxes.providers.apptainer.provider import ApptainerProvider
from sandboxes.providers.apptainer.setups import ContainerSetups
from tests.support.repeated_starts import runs_apptainer
from tests.support.users.as_user import ordinary_user

pytestmark = [pytest.mark.apptainer, pytest.mark.slow(seconds=20)]

PRCTL = "import ctypes; c = ctypes.CDLL(None).prctl; n = ctypes.c_int(); print(c(3), c(2, ctypes.byref(n)), n.value)"
"""Prints whether the process can be looked into, and the signal that it gets when its parent ends."""
LOOK = rf"""
for file in passwd group hosts resolv.conf; do echo "$file"; cat "/etc/$file"; done
stat -c '%n %F %a %u:%g %t,%T' / /* /dev /dev/* /dev/pts/* /etc/passwd /etc/group /etc/hosts /run/rollout/*
ls -A /dev/shm /dev/mqueue /tmp /sys /sys/class/net; readlink /dev/fd /dev/std*
id; hostname; pwd; umask; cat /proc/self/uid_map /proc/self/gid_map /proc/self/setgroups /proc/self/oom_score_adj
grep -E '^(Groups|Sig|Shd|Cap|NoNew|Seccomp|Umask|Threads)' /proc/self/status /proc/1/status
grep -v processes /proc/self/limits; ulimit -a | grep -v processes; ps -e -o user,comm
for path in /dev/null /dev/zero /dev/kmsg /sys/kernel /proc/sys/kernel/hostname /proc/1/mem; do
  test -w $path && echo "can write $path"
done
unshare -U true; unshare -m true; mount -t tmpfs none /mnt; mknod /tmp/device c 1 3; chroot / true; nice -n -5 true
dd if=/dev/zero of=/data/x bs=1 count=1; cat /data/given; df --output=size / /dev/shm
cut -d: -f1 /proc/net/dev; python3 -c '{PRCTL}'
rm -r /srv && mkdir /srv && echo removed
stat -c '%n %a %u:%g' /proc/1/root /proc/1/environ /proc/1/fd; ls /proc/1/fd
"""


async def views(provider: SandboxProvider, spec: SandboxSpec) -> list[dict[str, list[str]]]:
    """Return the views into two sandboxes, of which Apptainer starts only the first."""
    found = []
    for number in range(2):
        async with await provider.start(spec) as sandbox:
            assert runs_apptainer(sandbox) == (number == 0)
            found.append(await view(sandbox))
    return found


async def view(sandbox: Sandbox) -> dict[str, list[str]]:
    """Return what can be seen of a sandbox from inside, and of its processes from the host, without its names."""
    first = find_first_process(sandbox.pid)
    result = await (await sandbox.bash()).run(f"export LC_ALL=C; exec 2>&1; {LOOK}", timeout=60)
    environment = (await sandbox.exec(["env"])).stdout.decode().replace(sandbox.id, "ID")
    # The order of mounts is free, and of those that lie on each other only the last one is seen.
    mounts = {line.split()[4]: describe_mount(line) for line in read(first.pid, "mountinfo").splitlines()}
    groups = [line.split(":")[1] for line in read(first.pid, "cgroup").splitlines() if line.endswith(sandbox.id)]
    return {
        "inside": result.output.replace(sandbox.id, "ID").splitlines(),
        "environment": sorted(environment.splitlines()),
        "mounts": sorted(f"{point} {mount}" for point, mount in mounts.items()),
        "shared namespaces": shared_namespaces(first.pid),
        "control groups": groups,
        "session": [str(read(pid, "stat").split()[5] == str(sandbox.pid)) for pid in (first.pid, sandbox.pid)],
    }


def describe_mount(line: str) -> str:
    """Return the options of a mount, and the type of its file system."""
    options, _, rest = line.partition(" - ")
    # Only Apptainer's own overlay lacks "nosuid", which changes nothing where nothing can gain rights.
    return f"{options.split()[5].replace('nosuid,', '')} {rest.split()[0]}"


def shared_namespaces(pid: int) -> list[str]:
    """Return the kinds of namespaces that a process has in common with this one."""
    inside = Path(f"/proc/{pid}/ns")
    return sorted(
        path.name for path in Path("/proc/self/ns").iterdir() if path.readlink() == (inside / path.name).readlink()
    )


def read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def specs(folder: Path) -> list[SandboxSpec]:
    """Return specifications for which Apptainer gets different arguments."""
    shared = folder / "shared"
    shared.mkdir()
    (shared / "given").write_text("given")
    binds = [Bind(str(shared), "/data"), Bind(str(shared / "given"), "/one")]
    return [
        SandboxSpec(read_only_binds=binds, workdir="/srv/work", env={"A": "b"}),
        SandboxSpec(network=("example.org",), listens=True, max_processes=40, disk_bytes=64 << 20),
        SandboxSpec(network="full"),
    ]


class OlderHost(Launcher):
    """A launcher on a host where an overlay cannot note that a folder of the image was removed."""

    def can_overlay(self, image: Path) -> bool:
        return False


async def compare(folder: Path, *, older: bool = False) -> int:
    """Compare the two ways for each specification; return how many were compared."""
    provider = ApptainerProvider(ApptainerConfig(), folder / "state")
    if older:
        provider.launcher = OlderHost(*resolve_user(ApptainerConfig().user))
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGHUP, signal.SIGUSR1)}
    try:
        kinds = specs(folder)
        for spec in kinds:
            by_apptainer, by_launcher = await views(provider, spec)
            for name, seen in by_apptainer.items():
                differs = list(unified_diff(seen, by_launcher[name], "by Apptainer", "by the launcher", n=0))
                assert not differs, (name, *differs)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        await provider.close()
    return len(kinds)


async def refuse(*_: object) -> NoReturn:
    """Refuse a launch as a host does that lets no process be forked for another."""
    raise PermissionError(errno.EPERM, "clone")


@pytest.mark.parametrize("forks", [True, False], ids=["forked", "started"])
async def test_a_repeated_start_makes_the_same_sandbox(tmp_path, monkeypatch, forks):
    if not forks:
        monkeypatch.setattr(ForkServer, "launch", refuse)
    assert await compare(tmp_path) == 3


@pytest.mark.parametrize("host", ["this", "older"])
def test_a_repeated_start_of_an_ordinary_user_makes_the_same_sandbox(host):
    with ordinary_user() as user:
        done = user.run(["python", "-m", __name__, host], timeout=120)
        assert done.returncode == 0, done.stdout
        assert user.remaining_processes() == []


@pytest.mark.parametrize("ends", ["launcher", "service"])
async def test_a_repeated_sandbox_ends_with_its_launcher(provider, ends):
    await (await provider.start(SandboxSpec())).close()
    sandbox = await provider.start(SandboxSpec())
    assert not runs_apptainer(sandbox)
    first = find_first_process(sandbox.pid)
    if ends == "launcher":
        sandbox._launched.resources.process.kill()
    else:
        sandbox._launched.control.close()
    with anyio.fail_after(5):
        while psutil.pid_exists(first.pid):
            await anyio.sleep(0.01)
    assert not sandbox.healthy
    await sandbox.close()


@pytest.mark.parametrize("reuse", [True, False], ids=["repeated", "by Apptainer"])
async def test_a_sandbox_outlives_a_signal_that_asks_its_launcher_to_end(tmp_path, reuse):
    provider = make_provider(ApptainerConfig(reuse_setups=reuse), tmp_path)
    try:
        await (await provider.start(SandboxSpec())).close()
        sandbox = await provider.start(SandboxSpec())
        assert runs_apptainer(sandbox) != reuse
        bash = await sandbox.bash()
        os.kill(sandbox.pid, signal.SIGTERM)
        assert (await bash.run("echo up")).output == "up\n"
    finally:
        await provider.close()


UNUSUAL = """
import anyio, os, signal, sys
from pathlib import Path
from sandboxes import ApptainerConfig, SandboxSpec, make_provider
from tests.support.repeated_starts import runs_apptainer

async def main():
    provider = make_provider(ApptainerConfig(), Path(sys.argv[1]))
    for _ in range(2):
        async with await provider.start(SandboxSpec()) as sandbox:
            print(runs_apptainer(sandbox), (await sandbox.exec(["echo", "up"])).stdout)
    await provider.close()

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for closed in (0, 2):
    os.close(closed)
anyio.run(main)
"""


def test_a_service_without_standard_streams_that_ignores_its_children_repeats_starts(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", UNUSUAL, str(tmp_path)], stdout=subprocess.PIPE, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [b"True b'up\\n'", b"False b'up\\n'"]


LIAR = """#!/bin/bash.real
if [[ $2 == -c ]]; then exec env -- LIE=1 /bin/bash.real "$1" -c "${3//cp \\/bin\\/bash/cp /bin/bash.real}" "${@:4}"; fi
exec /bin/bash.real "$@"
"""
"""A bash that reports more variables than it was given."""


async def test_a_sandbox_with_files_of_another_tells_nothing_about_its_kind(tmp_path):
    saved, provider = tmp_path / "saved", ApptainerProvider(ApptainerConfig(), tmp_path / "state")
    try:
        async with await provider.start(SandboxSpec()) as sandbox:
            await sandbox.write_file("/liar", LIAR)
            await (await sandbox.bash()).run("cp /bin/bash /bin/bash.real; chmod +x /liar; mv -f /liar /bin/bash")
            with saved.open("wb") as file:
                file.writelines([part async for part in sandbox.save()])
        provider._setups = ContainerSetups()  # as after a restart
        for spec, by_apptainer in ((SandboxSpec(saved=saved), True), (SandboxSpec(), True), (SandboxSpec(), False)):
            async with await provider.start(spec) as sandbox:
                assert runs_apptainer(sandbox) == by_apptainer
                found = (await sandbox.exec(["env"])).stdout.split()
        assert b"LIE=1" not in found
    finally:
        await provider.close()


async def test_containers_are_made_only_of_images_of_which_one_was_tried(tmp_path):
    provider = ApptainerProvider(ApptainerConfig(), tmp_path / "state")
    try:
        image = (await provider.prepared_images.prepare("base")).image
        assert provider.launcher.can_make_container(image)
        for name in ("dev", "proc", "sys", "etc"):
            (tmp_path / "image" / name).mkdir(parents=True)
        assert not provider.launcher.can_make_container(tmp_path / "image")  # it has no bash
        assert not Launcher(os.geteuid(), os.getegid(), fakeroot=True).can_make_container(image)
    finally:
        await provider.close()


async def test_a_folder_of_unpacked_images_that_cannot_be_written_fails_the_start(tmp_path):
    (tmp_path / "file").touch()
    provider = ApptainerProvider(ApptainerConfig(unpacked_dir=tmp_path / "file/unpacked"), tmp_path / "state")
    for act in (provider.start, provider.saves):
        with pytest.raises(SandboxStartError, match=r"image base cannot be prepared: .* Not a directory"):
            await act(SandboxSpec())
    await provider.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        sys.exit(anyio.run(partial(compare, Path(name), older=sys.argv[1] == "older")) != 3)
