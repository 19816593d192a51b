"""Run folders are private and short, and their removal copes with what overlays leave."""

import os
from pathlib import Path

import pytest

from sandboxes.errors import SandboxConfigError
from sandboxes.reaper import remove
from sandboxes.rundir import new_run_folder, run_base


def test_a_long_path_is_refused_with_advice(tmp_path: Path) -> None:
    with pytest.raises(SandboxConfigError, match="too long") as error:
        run_base(tmp_path / ("x" * 100))
    assert "run_dir" in error.value.hint


def test_a_folder_of_others_is_refused(tmp_path: Path) -> None:
    base = Path("/tmp") / f"rs-test-{os.getpid()}"
    base.mkdir(mode=0o777)
    base.chmod(0o777)
    try:
        with pytest.raises(SandboxConfigError, match="only this user"):
            run_base(base)
    finally:
        base.rmdir()


def test_pipes_can_be_entered_but_not_listed(tmp_path: Path) -> None:
    folder = new_run_folder(tmp_path)
    folder.create(os.geteuid(), os.getegid())
    assert folder.pipes.stat().st_mode & 0o777 == 0o311
    assert folder.sockets.stat().st_mode & 0o777 == 0o700
    assert folder.said() == "nothing"
    (folder.overlay / "work").mkdir()
    (folder.overlay / "work/work").mkdir(mode=0)
    assert remove(folder.path, None) is None
    assert not folder.path.exists()


def test_removal_follows_no_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").touch()
    folder = new_run_folder(tmp_path)
    folder.create(os.geteuid(), os.getegid())
    (folder.overlay / "link").symlink_to(outside)
    assert remove(folder.path, None) is None
    assert (outside / "file").exists()
