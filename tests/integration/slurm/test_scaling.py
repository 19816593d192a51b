"""A job of a real Slurm grows while rollouts wait, shrinks after them, and loses nothing when nodes are cancelled."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from psutil import Popen

from tests.support.redis_server import program as redis_program
from tests.support.slurm.cluster import SlurmCluster, slurm_cluster
from tests.support.slurm.jobs import Jobs

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.redis,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.slow(seconds=120),
]

ROLLOUTS = 120
FEW = ["--serve-flag=--rollout-workers=1", "--serve-flag=--init-workers=1"]
"""A node alone needs four minutes for the rollouts."""
LATE = 120.0
"""A busy machine may take so long for what should take seconds."""
QUICK = ["--interval", "1", "--grow-after", "2", "--shrink-after", "3"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def jobs(cluster: SlurmCluster) -> Jobs:
    return Jobs(cluster)


@contextmanager
def scaling(jobs: Jobs, name: str, *options: str) -> Iterator[Popen]:
    """Scale a job quickly within the block."""
    scale = ["slurm", "scale", name, "--folder", str(jobs.folder), "--partition", "low", *QUICK, *options]
    with jobs.running("rollout-service", *scale) as process:
        yield process


def more(jobs: Jobs, name: str) -> list[dict]:
    """Return the nodes that have joined a job."""
    return [node for node in jobs.nodes(name).values() if f"-{name}-more-" in node["node"]]


def queued(cluster: SlurmCluster, name: str) -> list[str]:
    """Return the jobs of more nodes that Slurm has."""
    return cluster.run("squeue", "-h", "-r", "-n", f"{name}-more", "-o", "%i").stdout.split()


def hasten(jobs: Jobs, name: str) -> None:
    """Let the first node do the rest at once."""
    many = ["--rollout-workers", "64", "--init-workers", "8"]
    url = next(node["url"] for node in jobs.status(name)["nodes"])
    jobs.run("rollout-service", "nodes", "set", *many, env=jobs.variables(name) | {"ROLLOUT_URL": url})


@pytest.mark.timeout(400)
def test_a_job_grows_and_shrinks_with_its_work_and_a_cancelled_node_loses_nothing(cluster, jobs):
    home = jobs.submit("home", "--joinable", "--redis-server", redis_program(), *FEW, delay=2.0)
    first = set(jobs.nodes("home"))
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(jobs.roll_out, "home", ROLLOUTS)
        with scaling(jobs, "home", "--max", "1"):
            works = "it has not joined, or has no work"
            cluster.wait_for(
                lambda: [one for one in more(jobs, "home") if one["finished"] and one["rollouts"]],
                LATE,
                works,
            )
            [killed] = queued(cluster, "home")
        with scaling(jobs, "home", "--max", "1") as scaler:  # another one goes on with what is there
            cluster.run("scancel", "--full", killed)
            cluster.wait_for(lambda: killed not in queued(cluster, "home"))
            cluster.wait_for(lambda: [one for one in more(jobs, "home") if one["state"] == "ready"], LATE)
            hasten(jobs, "home")
            results = working.result(timeout=LATE)
            assert [result["reward"] for result in results] == [1.0] * ROLLOUTS
            cluster.wait_for(lambda: not queued(cluster, "home") and set(jobs.nodes("home")) == first, LATE)
            assert jobs.ends("home") == Counter(result["rollout_id"] for result in results)
            assert cluster.state(home) == "RUNNING", "the first job is never ended"
            jobs.slurm("stop", "home")
            said, _ = scaler.communicate(timeout=LATE)
            assert scaler.returncode == 0, said
    assert said.count("submit home-more-1") == 1, said
    assert "one more node would take" in said
    assert "drain home-more-1" in said
    assert "end home-more-1" in said
    cluster.wait_for(lambda: cluster.idle() == 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no-such-job", "--max", "1"], "there is no job no-such-job"),
        (["alone", "--max", "1"], "job alone cannot be joined"),
        (["apart", "--max", "1", "--min", "2"], "--min is more than --max"),
        (["apart", "--max", "1", "--cpus", "99"], "its largest has 4 processors"),
        (["apart", "--max", "1", "--time", "5", "--ahead", "300"], "would be drained at once"),
        (["apart", "--max", "1", "--time", "soon"], "'soon' is not a limit of time"),
        (["apart", "--max", "1", "--directive", "wrap=x"], "is not an option of sbatch"),
        (["apart", "--max", "1"], "job apart has not been submitted"),
        (["apart", "--max", "2"], "apart-more-2 is the folder of another job"),
    ],
)
def test_what_cannot_be_scaled_is_refused_at_once(cluster, jobs, arguments, said):
    for name, options in {"alone": [], "apart": ["--joinable"], "apart-more-2": []}.items():
        jobs.slurm("submit", "--write-only", "--name", name, "--time", "10", *options)
    output = jobs.slurm("scale", *arguments, check=False)
    assert said in output
    assert "hint:" in output


@pytest.mark.extended("rollout_service/cluster/", "rollout_service/cli/slurm/")
@pytest.mark.timeout(600)
def test_nodes_are_preempted_and_drained_ahead_of_their_limit_and_replaced_and_lose_nothing(cluster, jobs):
    jobs.submit("long", "--joinable", "--redis-server", redis_program(), *FEW, "--drain", "10", delay=2.0)
    away = ["--time", "2", "--ahead", "80", "--directive=--nodelist=n3"]
    with scaling(jobs, "long", "--max", "2", *away) as scaler, ThreadPoolExecutor(1) as pool:
        working = pool.submit(jobs.roll_out, "long", 2 * ROLLOUTS)
        cluster.wait_for(lambda: [one for one in more(jobs, "long") if one["state"] == "draining"], 2 * LATE)
        cluster.wait_for(lambda: [one for one in more(jobs, "long") if one["rollouts"]], LATE)
        jobs.preempt(queued(cluster, "long")[-1], "n3")
        hasten(jobs, "long")
        results = working.result(timeout=LATE)
        assert [result["reward"] for result in results] == [1.0] * 2 * ROLLOUTS
        assert jobs.ends("long") == Counter(result["rollout_id"] for result in results)
        jobs.slurm("stop", "long")
        said, _ = scaler.communicate(timeout=LATE)
    assert "its job ends in" in said
    cluster.wait_for(lambda: not queued(cluster, "long"), LATE)
