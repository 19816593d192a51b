"""`doctor` names the shared resources that a sandbox can exhaust, and how to prevent it."""

import os
from pathlib import Path

import pytest

from rollout_service.cli.doctor.checks import check_sharing
from rollout_service.settings import Settings
from sandboxes import ApptainerConfig, LocalConfig
from sandboxes.providers.apptainer.sharing import read_sharing


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
