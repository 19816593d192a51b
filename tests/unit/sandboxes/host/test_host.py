"""Apptainer is found in a fixed order of places, and the host's facts lead to the right conclusions."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes.errors import ProviderUnavailableError
from sandboxes.host.facts import HostFacts, apptainer_version, find_apptainer, read_host_facts
from sandboxes.limits.cgroups import find_control_groups

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
    sys_resource=False,
    sys_admin=False,
    max_open_files=None,
)


def program(path: Path, says: str = "apptainer version 1.4.5-2") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


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
    assert not FACTS.needs_no_privs, "an ordinary user has no privileges to give up"
    assert replace(FACTS, is_root=True).needs_no_privs
    assert not replace(FACTS, is_root=True, sys_resource=True).needs_no_privs
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
        "print(facts.sys_admin, facts.sys_resource)"
    )
    done = subprocess.run([*drop, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
