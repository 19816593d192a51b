"""A root service runs sandboxes as another user, and the ids proposed for mapping belong to nobody else."""

import os
import pwd

import pytest

from sandboxes.errors import SandboxConfigError
from sandboxes.host.subordinate_ids import has_subordinate_ids, resolve_user, subordinate_ids_command


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
