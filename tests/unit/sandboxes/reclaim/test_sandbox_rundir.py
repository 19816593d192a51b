"""Run folders are private, short, locked by their service, and never shared by two."""

import os
import tempfile
from pathlib import Path

import pytest

from sandboxes import LocalConfig, make_provider
from sandboxes.errors import SandboxConfigError
from sandboxes.host.locks import try_lock
from sandboxes.reclaim.run_folders import NOTES, ServiceFolder, remember, run_base, run_bases


def test_a_long_path_is_refused_with_advice(tmp_path):
    with pytest.raises(SandboxConfigError, match="too long") as error:
        run_base(tmp_path / ("x" * 100))
    assert "run_dir" in error.value.hint


def test_a_folder_of_others_is_refused_and_never_swept(tmp_path):
    base = tmp_path / "open"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(SandboxConfigError, match="only this user"):
        run_base(base)
    assert base not in run_bases(base, tmp_path)


def test_a_folder_that_cannot_be_made_is_refused_and_one_that_cannot_be_reached_is_not_swept(tmp_path):
    with pytest.raises(SandboxConfigError, match="cannot be made") as error:
        run_base(Path("/proc/none/rs"))
    assert "run_dir" in error.value.hint
    remember(tmp_path, gone := tmp_path / ("x" * 300))
    assert gone not in run_bases(None, tmp_path)


async def test_a_provider_refuses_a_folder_of_others_at_its_start(tmp_path):
    base = tmp_path / "open"
    base.mkdir()
    base.chmod(0o777)
    provider = make_provider(LocalConfig(provider="local", run_dir=base), tmp_path)
    with pytest.raises(SandboxConfigError, match="only this user"):
        await provider.sweep()
    await provider.close()


def test_pipes_can_be_entered_but_not_listed(tmp_path):
    service = ServiceFolder(tmp_path)
    folder = service.new()
    folder.create(os.geteuid(), os.getegid())
    assert folder.pipes.stat().st_mode & 0o777 == 0o311
    assert folder.sockets.stat().st_mode & 0o777 == 0o700
    assert folder.log_tail() == "nothing"
    assert folder.id == f"{service.name}-1"
    assert service.new().id == f"{service.name}-2"
    service.close()


def test_the_users_of_sandboxes_can_enter_whatever_the_umask_is():
    """Batch systems hand on the umask of whoever submits, which is often 077."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        before = os.umask(0o077)
        try:
            service = ServiceFolder(run_base(Path(short) / "rs"))
            folder = service.new()
            folder.create(os.geteuid(), os.getegid())
        finally:
            os.umask(before)
        folders = (folder.path, *list(folder.path.parents)[:2])
        assert [path.stat().st_mode & 0o777 for path in folders] == [0o711] * 3
        service.close()


def test_a_service_folder_is_locked_until_it_is_closed(tmp_path):
    service = ServiceFolder(tmp_path)
    handle = os.open(service.path, os.O_RDONLY)
    assert not try_lock(handle)
    service.close()
    assert try_lock(handle)
    os.close(handle)


def test_a_removed_service_folder_is_noticed(tmp_path):
    service = ServiceFolder(tmp_path)
    assert service.intact
    service.path.rmdir()
    assert not service.intact
    service.path.mkdir()
    assert not service.intact, "another folder of the same name"
    service.close()


def test_a_missing_base_is_an_error_and_not_an_endless_search(tmp_path):
    with pytest.raises(FileNotFoundError):
        ServiceFolder(tmp_path / "missing")


def test_former_run_folders_are_remembered(tmp_path):
    state, former = tmp_path / "state", tmp_path / "former"
    assert former not in run_bases(None, state)
    former.mkdir(mode=0o711)
    remember(state, former)
    remember(state, former)
    (state / NOTES / "stray").touch()
    assert former in run_bases(None, state)
    former.rmdir()
    assert former not in run_bases(None, state)
