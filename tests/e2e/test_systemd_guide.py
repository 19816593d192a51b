"""The systemd guide of docs/how-to/deploy.md works as it is written, under a real systemd, for an ordinary user."""

import json
import os
from collections.abc import Iterator

import pytest

from tests.support.machine.systemd import Machine, systemd_machine
from tests.support.pages.blocks import ROOT, shell_blocks

pytestmark = [
    pytest.mark.extended("deploy/systemd/", "docs/how-to/deploy.md", "tests/support/machine/"),
    pytest.mark.apptainer,
    pytest.mark.timeout(600),
    pytest.mark.slow(seconds=200),
    pytest.mark.xdist_group("the systemd guide"),
]
if os.geteuid() != 0:
    pytestmark.append(pytest.mark.skip(reason="only root makes a machine with a systemd"))

GUIDE = [block.text for block in shell_blocks("docs/how-to/deploy.md") if "sudo" in block.text]
INSTALL, START, ADD_RIGHTS = GUIDE
ADD_USER, INSTALL_REST = INSTALL.split("\n", 1)
# The machine's root is an overlay, and so may be this one's. The kernel mounts no third on top for a sandbox.
HOME_IN_MEMORY = "mount -t tmpfs -o uid=rollout,gid=rollout,mode=700 tmpfs /var/lib/rollout-service"
ADDRESS = "https://example.org/rollout-service"
CALL = """
source /etc/rollout-service/environment
curl -sS 'http://127.0.0.1:8080/v1/rollouts?wait=60' -H "authorization: Bearer $ROLLOUT_KEYS" \
  -H 'content-type: application/json' \
  -d '{"task": {"environment": "calc", "instance": {"question": "What is 12*7?", "answer": 84}}}'
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with systemd_machine(tmp_path_factory.mktemp("machine")) as started:
        install = "\n".join([ADD_USER, HOME_IN_MEMORY, INSTALL_REST.replace(ADDRESS, f"file://{ROOT}")])
        done = started.run(f"set -e\n{install}", timeout=400)
        assert done.returncode == 0, done.stdout
        done = started.run(f"set -e\n{START}")
        assert done.returncode == 0, done.stdout + journal(started)
        yield started


def journal(machine: Machine) -> str:
    return machine.run("journalctl --no-pager -u rollout-service").stdout


def shown(machine: Machine, *names: str) -> list[str]:
    flags = " ".join(f"--property={name}" for name in names)
    return sorted(machine.run(f"systemctl show rollout-service {flags}").stdout.split())


@pytest.fixture(autouse=True)
def settings(machine: Machine) -> Iterator[None]:
    """Give each test the guide's own settings, and a service that runs."""
    machine.run("cp /etc/rollout-service/rollout.toml /run/rollout.toml")
    yield
    machine.run("cp /run/rollout.toml /etc/rollout-service; systemctl reset-failed; systemctl restart rollout-service")
    ready = machine.run("curl -sS --retry 10 --retry-all-errors --max-time 60 http://127.0.0.1:8080/ready")
    assert ready.returncode == 0, ready.stdout + journal(machine)


def completes(machine: Machine) -> bool:
    said = machine.run(CALL).stdout
    assert said.startswith("{"), said + journal(machine)
    rollout = json.loads(said)
    return (rollout["state"], rollout["reward"]) == ("completed", 1.0)


def test_the_service_works_with_sandboxes(machine):
    assert completes(machine), journal(machine)
    owner = machine.run("ps -o user= -C rollout-service").stdout.split()
    assert set(owner) == {"rollout"}
    files = machine.run("stat -c '%a %U' /etc/rollout-service/environment /var/lib/rollout-service").stdout
    assert files == "600 root\n700 rollout\n"


def test_with_more_rights_code_may_be_root_inside(machine):
    machine.run("printf '[sandbox]\\nfakeroot = true\\n' >>/etc/rollout-service/rollout.toml")
    done = machine.run(f"set -e\n{ADD_RIGHTS}\ncurl -s --retry 10 --retry-all-errors http://127.0.0.1:8080/ready")
    assert done.returncode == 0, done.stdout + journal(machine)
    assert completes(machine), journal(machine)


def test_a_wrong_setting_ends_it_for_good(machine):
    machine.run("sed -i '1i port = \"none\"' /etc/rollout-service/rollout.toml; systemctl restart rollout-service")
    machine.run("until systemctl is-failed rollout-service; do sleep 0.2; done", timeout=60)
    assert shown(machine, "NRestarts", "ExecMainStatus") == ["ExecMainStatus=1", "NRestarts=0"]
    assert "rollout.toml:1: port" in journal(machine)
