"""The host's programs, facts, ports and users are found, and leased to one sandbox at a time."""

import os
import pwd
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes import ApptainerConfig
from sandboxes.errors import ProviderUnavailableError, SandboxConfigError
from sandboxes.host import ports
from sandboxes.host.facts import HostFacts, apptainer_version, find_apptainer, read_host_facts
from sandboxes.host.subordinate_ids import (
    has_subordinate_ids,
    read_subordinate_ids,
    resolve_user,
    subordinate_ids_command,
)
from sandboxes.host.uid_leases import BLOCK, HostUsers, UserLease, is_taken
from sandboxes.limits.cgroups import find_control_groups
from sandboxes.providers.apptainer.launch.rights import swap_ids
from tests.support.scripts import write_script

FACTS = HostFacts(
    apptainer=None,
    apptainer_version=None,
    is_root=False,
    fuse=True,
    user_namespaces=True,
    cgroup_version=2,
    cgroup_limits=frozenset(),
    subuid_ranges=(),
    subgid_ranges=(),
    sys_admin=False,
    max_open_files=None,
)


def program(path: Path, says: str = "apptainer version 1.4.5-2") -> Path:
    return write_script(path, f"echo '{says}'\n")


def test_the_environment_variable_overrides_path(tmp_path):
    named, found = program(tmp_path / "named" / "mine"), program(tmp_path / "path" / "apptainer")
    environ = {"ROLLOUT_APPTAINER": str(named), "PATH": str(found.parent)}
    assert find_apptainer(environ) == named
    del environ["ROLLOUT_APPTAINER"]
    assert find_apptainer(environ) == found


def test_the_installers_prefix_comes_last(tmp_path, monkeypatch):
    monkeypatch.setattr("sandboxes.host.facts.INSTALL_PREFIX", tmp_path)
    with pytest.raises(ProviderUnavailableError, match="not installed") as caught:
        find_apptainer({"PATH": str(tmp_path / "empty")})
    assert "install-apptainer" in caught.value.hint
    assert read_host_facts({"PATH": ""}).apptainer_version is None
    installed = program(tmp_path / "bin" / "apptainer")
    assert find_apptainer({"PATH": str(tmp_path / "empty")}) == installed


def test_a_named_binary_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ProviderUnavailableError, match="nowhere"):
        find_apptainer({"ROLLOUT_APPTAINER": str(tmp_path / "nowhere"), "PATH": os.defpath})


@pytest.mark.parametrize(("says", "version"), [("apptainer version 1.4.5-2", "1.4.5"), ("nothing", None)])
def test_versions_are_read(tmp_path, says, version):
    assert apptainer_version(program(tmp_path / "apptainer", says)) == version
    assert apptainer_version(tmp_path / "missing") is None


def test_facts_are_read_from_this_host(tmp_path):
    binary = program(tmp_path / "apptainer")
    facts = read_host_facts({"ROLLOUT_APPTAINER": str(binary)})
    assert facts.require_apptainer() == binary
    assert facts.apptainer_version == "1.4.5"
    assert facts.is_root == (os.geteuid() == 0)
    assert facts.cgroup_version in {None, 1, 2}
    assert facts.cgroup_limits == find_control_groups().enforced, "what sandboxes will get, not a guess of it"


def test_facts_are_interpreted():
    with pytest.raises(ProviderUnavailableError):
        FACTS.require_apptainer()
    assert FACTS.mounts_images, "an ordinary user mounts through FUSE"
    assert not replace(FACTS, is_root=True).mounts_images
    assert replace(FACTS, is_root=True, sys_admin=True, fuse=False).mounts_images
    assert not FACTS.fakeroot
    mapped = replace(FACTS, subuid_ranges=("me:100000:65536",), subgid_ranges=("me:100000:65536",))
    assert mapped.fakeroot
    assert not replace(mapped, user_namespaces=False).fakeroot
    assert replace(FACTS, is_root=True).fakeroot


def test_root_without_capabilities_cannot_mount_images():
    """Root in a plain container is like that; an ordinary user has no capabilities to begin with."""
    drop = ["setpriv", "--bounding-set", "-all"] if os.geteuid() == 0 else []
    code = (
        "from sandboxes.host.facts import read_host_facts\n"
        "facts = read_host_facts({'PATH': ''})\n"
        "print(facts.sys_admin)"
    )
    done = subprocess.run([*drop, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_a_port_is_free_and_below_those_that_the_kernel_gives():
    port = ports.free_port()
    assert port < int(ports.GIVEN.read_text().split()[0])
    with socket.create_server(("127.0.0.1", port)):
        assert ports.free_port() != port


def test_a_kernel_that_gives_all_ports_leaves_none_below(tmp_path, monkeypatch):
    given = tmp_path / "range"
    given.write_text("1024\t65535\n")
    monkeypatch.setattr(ports, "GIVEN", given)
    with socket.create_server(("127.0.0.1", ports.free_port())) as server:
        assert server.getsockname()[1] >= 1024


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match="assign requested address"):
        ports.free_port("192.0.2.1")


@pytest.mark.parametrize("owner", [str(os.geteuid()), pwd.getpwuid(os.geteuid()).pw_name])
def test_ids_are_found_by_name_and_by_number(tmp_path, owner):
    files = (tmp_path / "subuid", tmp_path / "subgid")
    files[0].write_text(f"other:100000:65536\n{owner}:200000:65536\n")
    assert not has_subordinate_ids(os.geteuid(), files)
    files[1].write_text("other:100000:65536\n")
    assert not has_subordinate_ids(os.geteuid(), files)
    files[1].write_text(f"{owner}:200000:65536\n")
    assert has_subordinate_ids(os.geteuid(), files)


def test_root_runs_sandboxes_as_another_and_others_as_themselves(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    entry = pwd.getpwnam("nobody")
    assert resolve_user("nobody") == (entry.pw_uid, entry.pw_gid)
    with pytest.raises(SandboxConfigError, match="never run as root"):
        resolve_user("root")
    with pytest.raises(SandboxConfigError, match="no user"):
        resolve_user("nobody-of-this-name")
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "getegid", lambda: 5678)
    assert resolve_user("nobody") == (1234, 5678)


def test_proposed_ids_belong_to_nobody_else(tmp_path):
    files = (tmp_path / "subuid", tmp_path / "subgid")
    assert "--add-subuids 131072-196607 --add-subgids 131072-196607 " in subordinate_ids_command(files=files)
    files[0].write_text("first:100000:65536\nsecond:200000:65536\n")
    files[1].write_text("first:100000:65536\nthird:600000:10\nnot a line\n")
    assert "--add-subuids 655360-720895 --add-subgids 655360-720895 " in subordinate_ids_command(files=files)


NUMBERS = range(464_000 * BLOCK, 464_004 * BLOCK)


def leased(users: HostUsers, count: int = 1) -> list[UserLease]:
    found = [users.lease() for _ in range(count)]
    assert None not in found
    return [lease for lease in found if lease is not None]


def test_two_services_never_hold_one_id(tmp_path):
    folder = tmp_path / "users"
    services = [HostUsers(NUMBERS, folder) for _ in range(4)]
    numbers = [lease.number for users in services for lease in leased(users, 100)]
    assert len(set(numbers)) == 400
    assert all(number in NUMBERS for number in numbers)
    fifth = HostUsers(NUMBERS, folder)
    assert fifth.lease() is None
    for users in services:
        users.close()
    unused = HostUsers(NUMBERS, folder)
    unused.close()
    assert unused.lease() is None
    assert list(folder.iterdir()) == []
    after = HostUsers(NUMBERS, folder)
    leased(after)
    after.close()


@pytest.mark.slow
def test_services_with_overlapping_ranges_never_hold_one_id(tmp_path):
    start = NUMBERS.start
    ranges = range(start, start + BLOCK), range(start + 1, start + 2 * BLOCK)
    services = [HostUsers(numbers, tmp_path / "users") for numbers in ranges]
    numbers = [lease.number for users in services for lease in all_leases(users)]
    assert len(numbers) == len(set(numbers)) == 2 * BLOCK
    for users in services:
        users.close()


def all_leases(users: HostUsers) -> list[UserLease]:
    return list(iter(users.lease, None))


def test_an_id_is_reused_only_after_all_others(tmp_path):
    users = HostUsers(range(NUMBERS.start, NUMBERS.start + BLOCK), tmp_path / "users")
    leases = leased(users, BLOCK)
    assert users.lease() is None
    leases[7].release()
    leases[3].release()
    assert [lease.number for lease in leased(users, 2)] == [leases[7].number, leases[3].number]
    assert users.lease() is None
    users.close()


def test_the_block_of_a_dead_service_is_free_again(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from sandboxes.host.uid_leases import HostUsers; "
        "users = HostUsers(range(int(sys.argv[1]), int(sys.argv[2])), Path(sys.argv[3])); "
        "print(users.lease().number, flush=True); os.kill(os.getpid(), 9)"
    )
    only = range(NUMBERS.start, NUMBERS.start + BLOCK)
    arguments = [str(only.start), str(only.stop), str(tmp_path / "users")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False)
    assert int(done.stdout) in only
    other = HostUsers(range(only.stop, only.stop + BLOCK), tmp_path / "users")
    leased(other)
    assert [path.name for path in (tmp_path / "users").iterdir()] == [str(only.stop)], "the dead one's is removed"
    users = HostUsers(only, tmp_path / "users")
    leased(users)
    users.close()
    other.close()


def test_ids_of_users_processes_and_subordinates_are_never_taken(tmp_path, monkeypatch):
    mine = os.geteuid()
    assert is_taken(range(mine, mine + BLOCK)), "this process has one of them"
    assert is_taken(range(60_000, 70_000)), "nobody has one of them"
    assert not is_taken(NUMBERS)
    file = tmp_path / "subuid"
    file.write_text(f"# a comment\nother:100000:65536\n1000:{NUMBERS.start + 5}:1\nbroken:line\n")
    assert read_subordinate_ids(file) == [
        ("other", range(100_000, 165_536)),
        ("1000", range(NUMBERS.start + 5, NUMBERS.start + 6)),
    ]
    assert read_subordinate_ids(tmp_path / "none") == []
    monkeypatch.setattr("sandboxes.host.uid_leases.ID_FILES", (file,))
    assert is_taken(NUMBERS)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path):
    folder = tmp_path / "users"
    folder.mkdir()
    folder.chmod(0o777)
    assert HostUsers(NUMBERS, folder).lease() is None


@pytest.mark.parametrize("owner", [0, 1, 65_534, 3_000_000_000])
def test_the_map_gives_the_owners_files_to_the_user_and_changes_no_other(owner):
    user = NUMBERS.start
    lines = [tuple(map(int, line.split())) for line in swap_ids(owner, user).splitlines()]

    def seen(number: int) -> int | None:
        return next((to + number - first for first, to, count in lines if first <= number < first + count), None)

    assert seen(owner) == user
    assert seen(user) is None
    for other in {0, 1, 2, 65_533, 65_535, user - 1, user + 1, 2**32 - 2} - {owner}:
        assert seen(other) == other


@pytest.mark.parametrize("wrong", ["", "5", "1-2-3", "0-4294967294", "2000000-2000100", "a-b"])
def test_a_wrong_range_is_refused(wrong):
    with pytest.raises(ValueError, match="give"):
        ApptainerConfig(user_range=wrong)
    assert ApptainerConfig(user_range="none").user_range == "none"
