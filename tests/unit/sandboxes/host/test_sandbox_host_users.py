"""Host users are leased to one sandbox at a time, by one service at a time."""

import os
import subprocess
import sys

import pytest

from sandboxes import ApptainerConfig
from sandboxes.host.subordinate_ids import read_subordinate_ids
from sandboxes.host.uid_leases import BLOCK, HostUsers, UserLease, is_taken
from sandboxes.providers.apptainer.launch import swap_ids

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
    assert [path.name for path in (tmp_path / "users").iterdir()] == [str(only.stop)], (
        "the dead one's is removed"
    )
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
        return next(
            (to + number - first for first, to, count in lines if first <= number < first + count), None
        )

    assert seen(owner) == user
    assert seen(user) is None
    for other in {0, 1, 2, 65_533, 65_535, user - 1, user + 1, 2**32 - 2} - {owner}:
        assert seen(other) == other


@pytest.mark.parametrize("wrong", ["", "5", "1-2-3", "0-4294967294", "2000000-2000100", "a-b"])
def test_a_wrong_range_is_refused(wrong):
    with pytest.raises(ValueError, match="give"):
        ApptainerConfig(user_range=wrong)
    assert ApptainerConfig(user_range="none").user_range == "none"
