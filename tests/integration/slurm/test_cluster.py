"""The cluster of the tests is a real one: nodes have their own addresses, may die and return, and leave nothing."""

import getpass
import os
from collections.abc import Iterator

import pytest

from tests.support.slurm.cluster import REPOSITORY, USERS, SlurmCluster, slurm_cluster
from tests.support.users.as_user import ordinary_user

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

AS_A_USER = """
from tests.support.slurm.cluster import slurm_cluster

with slurm_cluster() as cluster:
    print(*sorted(cluster.run("srun", "-N3", "hostname", "-i").stdout.split()))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


def test_nodes_have_their_own_addresses_names_and_processes(cluster):
    said = cluster.run("srun", "-N3", "sh", "-c", "echo $(hostname) $(hostname -i) $(readlink /proc/self/ns/pid)")
    seen = [line.split() for line in said.stdout.splitlines()]
    assert sorted((name, address) for name, address, _ in seen) == [
        ("n1", "10.77.0.1"),
        ("n2", "10.77.0.2"),
        ("n3", "10.77.0.3"),
    ]
    assert len({namespace for *_, namespace in seen}) == 3


def test_a_node_that_loses_power_takes_its_processes_along_and_can_return(cluster):
    command = ["sbatch", "--parsable", "--no-requeue", "-w", "n3", "-o", "/dev/null"]
    job = cluster.run(*command, "--wrap", f"exec sleep 1{os.getpid()}").stdout.strip()
    cluster.wait_for(lambda: cluster.run("pgrep", "-f", f"^sleep 1{os.getpid()}", check=False).stdout)
    cluster.kill_node("n3")
    cluster.wait_for(lambda: not cluster.run("pgrep", "-f", f"^sleep 1{os.getpid()}", check=False).stdout, 5)
    cluster.run("scontrol", "update", "nodename=n3", "state=down", "reason=power")
    cluster.wait_for_state(job, "NODE_FAIL")
    cluster.start_node("n3")
    cluster.run("scontrol", "update", "nodename=n3", "state=resume")
    cluster.wait_for(lambda: cluster.idle() == 3)
    assert cluster.run("srun", "-w", "n3", "hostname").stdout == "n3\n"


def test_jobs_run_as_the_user_who_submitted_them(cluster):
    users = USERS if cluster.network.is_root else {getpass.getuser(): os.geteuid()}
    for name, uid in users.items():
        assert cluster.run("srun", "id", "-un", user=uid).stdout.strip() == name


def test_an_ordinary_user_has_such_a_cluster_too_and_leaves_nothing():
    with ordinary_user() as user:
        done = user.run([str(REPOSITORY / ".venv/bin/python"), "-c", AS_A_USER])
        assert (done.returncode, done.stdout.split()) == (0, ["10.77.0.1", "10.77.0.2", "10.77.0.3"]), done.stdout
        assert user.remaining_processes() == []
