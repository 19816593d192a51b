"""The service as jobs of a real Slurm: submitted, served, preempted and requeued, stopped, and shared by users."""

import json
import stat
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.redis_server import program as redis_program
from tests.support.slurm.cluster import USERS, SlurmCluster, slurm_cluster
from tests.support.slurm.jobs import SCRIPTED_ENGINE, Jobs

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm"), pytest.mark.slow(seconds=160)]

TRAINER = """#!/bin/bash
rollout-service slurm run "{folder}" &
eval "$(rollout-service slurm status "{folder}" --wait 60 | grep ^export)"
echo "trained with $ROLLOUT_URL"
kill -USR2 %1
wait %1
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def jobs(cluster: SlurmCluster) -> Jobs:
    return Jobs(cluster)


def check_rewards(results: list[dict], count: int) -> None:
    """Check that there are so many results, each with the whole reward; what failed is shown with its error."""
    failed = [result for result in results if result["reward"] != 1.0]
    assert not failed, json.dumps(failed)
    assert len(results) == count


def test_a_job_serves_rollouts_from_an_engine_of_its_own_and_stops(cluster, jobs):
    job = jobs.submit("alone")
    check_rewards(jobs.roll_out("alone", 8), 8)
    folder = jobs.folder / "alone"
    private = [folder, folder / "key", folder / "keys.toml", folder / "job.json"]
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in private] == [0] * 4
    key = (folder / "key").read_text()
    assert key not in cluster.run("ps", "-eo", "args").stdout
    jobs.slurm("stop", "alone")
    cluster.wait_for_state(job, "COMPLETED")
    assert "stopped" in jobs.slurm("logs", "alone", "--part", "node-n*"), "the service itself ended in order"
    assert list((folder / "nodes").iterdir()) == list((folder / "engines").iterdir()) == []
    cluster.wait_for(lambda: cluster.idle() == 3)
    assert cluster.run("pgrep", "-f", "rollout_service", check=False).stdout == ""
    # Another test's job may have left a folder: it lost a node.
    assert list(jobs.scratch.glob(f"rollout-*-{job}-*")) == []


@pytest.mark.extended("rollout_service/cluster/", "rollout_service/cli/slurm/")
def test_an_engine_that_dies_is_replaced(cluster, jobs):
    jobs.submit("replaced")
    check_rewards(jobs.roll_out("replaced", 2), 2)
    before = jobs.ready("replaced")["engines"]
    cluster.run("pkill", "-KILL", "-f", "rollout_service.testing")
    cluster.wait_for(lambda: jobs.status("replaced")["engines"] != before)
    cluster.wait_for(lambda: jobs.status("replaced")["engines"])
    jobs.slurm("stop", "replaced")


@pytest.mark.extended("rollout_service/cluster/", "rollout_service/cli/slurm/")
def test_an_engine_that_cannot_start_is_named_within_a_minute(cluster, jobs):
    job = jobs.submit("broken", "--engine-command", "sh -c 'echo no GPU is free >&2; exit 3' {host} {port}")
    cluster.wait_for_state(job, "RUNNING")
    cluster.wait_for(lambda: jobs.status("broken")["failures"], seconds=60)
    shown = jobs.slurm("status", "broken", "--wait", "1", check=False)
    assert "failed to start" in shown
    assert "exit code 3: no GPU is free" in shown
    cluster.wait_for(lambda: jobs.status("broken")["nodes"])
    [node] = jobs.status("broken")["nodes"]
    key = {"ROLLOUT_URL": node["url"], "ROLLOUT_KEY": (jobs.folder / "broken/key").read_text()}
    report = jobs.run("rollout-service", "doctor", "--live", "--json", check=False, env=key)
    assert "no backend is in service" in report
    jobs.slurm("stop", "broken")


@pytest.mark.extended("rollout_service/cluster/", "rollout_service/cli/slurm/")
def test_a_preempted_job_drains_is_requeued_and_resumes_with_its_work(cluster, jobs):
    job = jobs.submit("preempted", "--partition", "low", "--drain", "20")
    first = jobs.roll_out("preempted", 2)
    node = jobs.ready("preempted")["nodes"][0]["node"]
    jobs.preempt(job, node)
    jobs.release(job)
    found = jobs.ready("preempted")
    assert (found["job"], found["restarts"]) == (job, 1)
    again = jobs.roll_out("preempted", 4)
    assert [result for result in again if result["rollout_id"] == first[0]["rollout_id"]] == first[:1]
    jobs.slurm("stop", "preempted")


def test_engines_have_nodes_of_their_own_in_a_heterogeneous_job(cluster, jobs):
    jobs.submit("apart", "--engine-nodes", "1", "--engine-cpus", "4", "--engine-gpus", "2", "--engines-per-node", "2")
    check_rewards(jobs.roll_out("apart", 4), 4)
    found = jobs.ready("apart")
    cluster.wait_for(lambda: len(jobs.status("apart")["engines"]) == 2)
    assert {engine["node"] for engine in found["engines"]}.isdisjoint(node["node"] for node in found["nodes"])
    jobs.slurm("stop", "apart")


def test_a_trainer_finds_the_service_and_its_end_is_the_jobs(cluster, jobs):
    code = "import os; print('found', os.environ['ROLLOUT_URL'], len(os.environ['ROLLOUT_KEY'])); exit(7)"
    job = jobs.submit("trained", "--", "python", "-c", code)
    cluster.wait_for_state(job, "FAILED")
    assert "found http://10.77.0." in jobs.slurm("logs", "trained", "--part", "trainer")
    assert "ExitCode=7:0" in cluster.run("scontrol", "show", "job", job).stdout


@pytest.mark.extended("rollout_service/cluster/", "rollout_service/cli/slurm/")
def test_two_users_share_a_node_without_harm(cluster):
    if not cluster.network.is_root:
        return
    alice, bob = (Jobs(cluster, uid) for uid in USERS.values())
    for user in (alice, bob):
        user.submit("same", "--directive=--nodelist=n1")
    for user in (alice, bob):
        check_rewards(user.roll_out("same", 2), 2)
    urls = {user.ready("same")["url"] for user in (alice, bob)}
    assert len(urls) == 2
    denied = cluster.run("cat", str(alice.folder / "same/key"), user=USERS["bob"], check=False)
    assert "Permission denied" in denied.stderr
    for user in (alice, bob):
        user.slurm("stop", "same")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--engine-command", SCRIPTED_ENGINE, "--engine-nodes", "4"],
            "partition main has 3 such nodes of 3",
        ),
        (["--cpus", "99"], "its largest has 4 processors"),
        (["--memory", "900G"], "900G of memory"),
        (["--gpus", "3"], "3 GPUs"),
        (["--time", "2-0"], "ends jobs after 1:00:00"),
        (["--partition", "lo"], "there is no partition 'lo'"),
        (["--time", "soon"], "'soon' is not a limit of time"),
        (["--time", "1", "--drain", "60"], "is over before the drain"),
        (["--backend", "gpu-1:30000"], "is not the URL of an engine"),
        (["--engine-command", "serve --port 30000"], "has no {port}"),
        (["--directive", "wrap=x"], "is not an option of sbatch"),
        (["--name", "a b"], "name"),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_it_is_submitted(cluster, jobs, arguments, said):
    output = jobs.slurm("submit", "--time", "10", *arguments, check=False)
    assert said in output
    assert "hint:" in output
    assert "submitted" not in output


def test_a_script_can_be_read_before_it_is_submitted(cluster, jobs):
    script = jobs.slurm("submit", "--dry-run", "--name", "dry", "--memory", "2G", "--partition", "main")
    assert script.startswith("#!/bin/bash\n")
    assert "#SBATCH --mem=2G\n" in script
    assert "#SBATCH --signal=B:USR1@120\n" in script
    assert not (jobs.folder / "dry").exists()


@pytest.mark.redis
def test_a_job_that_joins_another_does_its_work(cluster, jobs):
    jobs.slurm("submit", "--write-only", "--name", "alone-with-its-state", "--time", "10")
    said = jobs.slurm("submit", "--name", "guest", "--join", "alone-with-its-state", check=False)
    assert "cannot be joined" in said
    home = ["--nodes", "2", "--directive=--nodelist=n1,n2", "--redis-server", redis_program()]
    jobs.submit("home", *home)
    jobs.submit("guest", "--partition", "low", "--join", "home")
    jobs.ready("guest")
    key = jobs.variables("home")
    for node in ("n1", "n2"):
        jobs.run("rollout-service", "nodes", "drain", node, env=key)
    check_rewards(jobs.roll_out("guest", 4), 4)
    nodes = json.loads(jobs.run("rollout-service", "nodes", "list", "--json", env=key))["nodes"]
    assert {node["node"]: node["finished"] for node in nodes}.items() >= {"n1": 0, "n2": 0}.items()
    for name in ("guest", "home"):
        jobs.slurm("stop", name)


@pytest.mark.extended("rollout_service/cluster/", "rollout_service/cli/slurm/")
@pytest.mark.redis
def test_nodes_share_a_redis_of_the_job_through_the_death_of_one(cluster, jobs):
    job = jobs.submit("many", "--nodes", "3", "--redis-server", redis_program(), delay=1.0)
    jobs.ready("many")
    cluster.wait_for(lambda: len(jobs.status("many")["nodes"]) == 3)
    nodes = {node["node"]: node for node in jobs.ready("many")["nodes"]}
    first = cluster.run("squeue", "-h", "-j", job, "-o", "%B").stdout.strip()
    victim = max(set(nodes) - {first})
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(jobs.roll_out, "many", 60)
        cluster.wait_for(lambda: jobs.results("many").exists())
        cluster.kill_node(victim)
        results = running.result(timeout=120)
    check_rewards(results, 60)
    assert len({result["rollout_id"] for result in results}) == 60
    cluster.wait_for(lambda: "a node is lost" in jobs.slurm("logs", "many", "--part", "job-*"))
    found = jobs.ready("many")
    assert (found["state"], found["restarts"]) == ("RUNNING", 0), "the others went on"
    assert {node["node"] for node in found["nodes"]} == set(nodes) - {victim}
    jobs.slurm("stop", "many")
    cluster.wait_for_state(job, "COMPLETED", "NODE_FAIL")
    cluster.start_node(victim)
    cluster.wait_for(lambda: cluster.idle() == 3)


@pytest.mark.extended("rollout_service/cluster/", "rollout_service/cli/slurm/")
@pytest.mark.redis
@pytest.mark.timeout(400)
def test_nodes_and_their_redis_are_requeued_and_preempted_and_lose_nothing(cluster, jobs):
    nodes = ["--nodes", "2", "--directive=--nodelist=n1,n2", "--partition", "low", "--drain", "20"]
    few = "--serve-flag=--rollout-workers=4"  # so that most are still to do when the job is stopped
    job = jobs.submit("moved", *nodes, few, "--redis-server", redis_program(), delay=1.0)
    cluster.wait_for(lambda: len(jobs.nodes("moved")) == 2)
    with jobs.tunnel("moved") as url, ThreadPoolExecutor(1) as pool:
        running = pool.submit(jobs.roll_out, "moved", 120, url)
        cluster.wait_for(jobs.results("moved").exists)
        cluster.wait_for(jobs.results("moved").read_text)
        cluster.run("scontrol", "requeue", job)
        cluster.wait_for_state(job, "PENDING", "REQUEUED")
        jobs.release(job)
        assert jobs.ready("moved")["restarts"] == 1
        jobs.preempt(job, "n1")
        assert not running.done()
        jobs.release(job)
        results = running.result(timeout=200)
        assert jobs.ready("moved")["restarts"] == 2
    check_rewards(results, 120)
    assert jobs.ends("moved") == Counter(result["rollout_id"] for result in results)
    jobs.slurm("stop", "moved")


def test_a_trainers_own_script_runs_the_service_beside_it(cluster, jobs):
    said = jobs.slurm(
        "submit",
        "--write-only",
        "--name",
        "beside",
        "--scratch",
        str(jobs.scratch),
        "--engine-command",
        SCRIPTED_ENGINE.format(delay=0),
        "--serve-flag=--sandbox=local",
        f"--serve-flag=--environment={jobs.home}/echo",
    )
    assert "beside/job.sh" in said
    script = jobs.home / "trainer.sh"
    script.write_text(TRAINER.format(folder=jobs.folder / "beside"))
    command = ["sbatch", "--parsable", "-n1", "-o", str(jobs.home / "trainer.out"), str(script)]
    job = cluster.run(*command).stdout.strip()
    cluster.wait_for_state(job, "COMPLETED", "FAILED")
    assert "trained with http://10.77.0." in (jobs.home / "trainer.out").read_text()
    assert cluster.state(job) == "COMPLETED"


def test_a_job_that_does_not_exist_is_said_to_be_missing(cluster, jobs):
    assert "there is no job nothing in" in jobs.slurm("status", "nothing", check=False)
