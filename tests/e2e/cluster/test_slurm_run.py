"""A trainer's run on a real Slurm, while nodes are killed, preempted and drained: every result comes exactly once.

Everything is real: Slurm's daemons, machines with their own addresses, the Redis that the job starts, sandboxes in
Apptainer, and engines that sample from a model: SGLang on a node of its own, or the embedded engine beside the service.
Afterwards nothing is left on any machine.
"""

import json
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from rollout_service.engines.local_servers.cpu_server import SGLangCpuServer
from rollout_service.engines.shipped import policy_folder
from sandboxes.images.store import ImageStore
from tests.support.redis_server import program as redis_program
from tests.support.slurm import trainer
from tests.support.slurm.cluster import USERS, SlurmCluster, slurm_cluster
from tests.support.slurm.jobs import Jobs
from tests.support.slurm.machines import what_is_there

pytestmark = [
    pytest.mark.extended("rollout_service/cluster/", "rollout_service/cli/slurm/"),
    pytest.mark.slurm,
    pytest.mark.redis,
    pytest.mark.apptainer,
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.slow(seconds=370),
]

MODEL = policy_folder("calc-tuned")
BATCH_GROUPS, BATCHES = 5, 5
"""Three batches are rolled out before the first is acknowledged, and one more after each acknowledgment. A few groups
more are begun each time, in case some are dropped; they are fewer than a batch has, so there is work after each."""
RUN_SECONDS = 240.0
LEFT_SECONDS = 30.0
PIPELINE = "[pipeline]\ninit_workers = 1\ninit_queue = 1\nrollout_workers = 2\nrollout_queue = 1\n"
"""Two nodes have fewer places than a batch has rollouts, so every node gets some of each batch."""
WORKS = """
import os, pathlib, sys, time, httpx
url, node, permits, batches = sys.argv[1:]
until, headers = time.monotonic() + 120, {"Authorization": "Bearer " + os.environ["ROLLOUT_KEY"]}
def ask():
    nodes = httpx.get(url + "/v1/nodes", headers=headers, timeout=60).json()
    [found] = [one for one in nodes if one["node"] == node]
    return found, nodes
before = ask()[0]["finished"]
pathlib.Path(permits).write_text(batches)
while time.monotonic() < until:
    found, nodes = ask()
    if found["rollouts"] or found["finished"] > before:
        sys.exit()
    time.sleep(0.02)
runs = httpx.get(url + "/v1/runs", headers=headers, timeout=60).text
sys.exit(f"{node} does nothing: {runs} {nodes}")
"""


class TrainedRun:
    """A run of a trainer on the login machine, which reaches the service through a tunnel."""

    def __init__(self, jobs: Jobs, job: str, group_size: int, stack: ExitStack) -> None:
        self.jobs, self.job, self.group_size = jobs, job, group_size
        self.record, self.permits = jobs.home / "record.jsonl", jobs.home / "permits"
        self.record.touch()
        self.permits.write_text("-1")
        request = jobs.home / "run.json"
        request.write_text(json.dumps(self._request()))
        for path in (self.record, self.permits, request):
            os.chown(path, jobs.user or os.geteuid(), -1)
        url = {"ROLLOUT_URL": stack.enter_context(jobs.tunnel(job))}
        command = [sys.executable, trainer.__file__, str(request), str(self.record), str(self.permits)]
        self.process: psutil.Popen = stack.enter_context(jobs.running(*command, env=jobs.variables(job) | url))

    def _request(self) -> dict:
        groups = range(BATCHES * BATCH_GROUPS)
        sums = [{"question": f"{number} + {3 * number}", "answer": 4 * number} for number in groups]
        tasks = [{"environment": "calc", "instance": instance} for instance in sums]
        source = {"kind": "inline", "tasks": tasks}
        run = {"run_id": "run", "source": source, "group_size": self.group_size, "batch_size": BATCH_GROUPS}
        return run | {"filters": []}

    @property
    def count(self) -> int:
        return BATCHES * BATCH_GROUPS * self.group_size

    def allow(self, batches: int, job: str, machine: str, node: str) -> None:
        """Let the trainer acknowledge so many batches in all, and wait until a node has rollouts or has ended some.

        The node is asked itself, so it still has them when this returns, unless they end at once.
        """
        [url] = [found["url"] for found in self.jobs.status(job)["nodes"] if found["node"] == machine]
        watch = ["python", "-c", WORKS, url, node, str(self.permits), str(batches)]
        self.jobs.run(*watch, env=self.jobs.variables(job))

    def check_each_result_came_once(self) -> None:
        self.permits.write_text(str(BATCHES))
        said, _ = self.process.communicate(timeout=RUN_SECONDS)
        assert said.endswith("trained\n"), said
        samples = [json.loads(line) for line in self.record.read_text().splitlines()]
        assert len({sample["rollout_id"] for sample in samples}) == len(samples) == self.count
        assert Counter(sample["state"] for sample in samples) == {"completed": self.count}
        assert all(sample["segments"] and sample["reward"] is not None for sample in samples)
        assert self.jobs.ends(self.job) == Counter(sample["rollout_id"] for sample in samples)


def embedded() -> list[str]:
    """Return the options for an embedded engine beside the service."""
    command = "python -m rollout_service.engines.kinds.embedded --host {host} --port {port} --model "
    return ["--engine-command", command + shlex.quote(str(MODEL))]


def sglang_on_a_node_of_its_own() -> list[str]:
    """Return the options for a heterogeneous job."""
    command = SGLangCpuServer(MODEL).job_command()
    return ["--engine-command", command, "--engine-nodes", "1", "--engine-cpus", "4", "--engine-gpus", "1"]


RUNS = [pytest.param(None, 8, sglang_on_a_node_of_its_own, id="whoever runs the cluster")]
if os.geteuid() == 0:  # an ordinary user who runs a cluster is the only one there
    RUNS.append(pytest.param(USERS["alice"], 4, embedded, id="an ordinary user"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with slurm_cluster(4) as running:
        yield running


def submit(jobs: Jobs, name: str, *arguments: str) -> str:
    """Submit a job whose sandboxes are Apptainer's, with its files on the machines' own disks."""
    local = jobs.cluster.network.local
    config = jobs.home / "rollout.toml"
    run_dir = local / f"rs-{jobs.home.name}"  # no user may write to another's
    config.write_text(f'[sandbox]\nrun_dir = "{run_dir}"\n[sandboxes.warm]\nsize = 0\n' + PIPELINE)
    flags = ["--scratch", str(local), "--config", str(config), "--images-dir", str(ImageStore().root)]
    return jobs.submit_plain(name, *flags, "--drain", "20", *arguments)


def check_nothing_is_left(cluster: SlurmCluster, before: dict, nodes: list[str]) -> None:
    cluster.wait_for(lambda: cluster.idle() == len(cluster.nodes))
    deadline = time.monotonic() + LEFT_SECONDS
    while (now := what_is_there(cluster)) != before:
        assert time.monotonic() < deadline, {kind: (before[kind], now[kind]) for kind in now}
    for node in nodes:
        left = [path for path in cluster.network.disk(node).rglob("*") if not path.name.startswith("rs-")]
        assert left == [], node


@pytest.mark.parametrize(("user", "group_size", "engine"), RUNS)
def test_a_run_outlives_a_killed_a_preempted_and_a_drained_node(cluster, user, group_size, engine):
    jobs, before = Jobs(cluster, user), what_is_there(cluster)
    own_redis = ["--nodes", "2", "--directive=--nodelist=n1,n2", "--redis-server", redis_program()]
    first = submit(jobs, "first", *own_redis, *engine())
    jobs.ready("first")
    second = submit(jobs, "second", "--partition", "low", "--directive=--nodelist=n4", "--join", "first")
    cluster.wait_for(lambda: set(jobs.nodes("first")) == {"n1", "n2", "n4-second"})
    with ExitStack() as stack:
        run = TrainedRun(jobs, "first", group_size, stack)

        run.allow(0, "second", "n4", "n4-second")
        jobs.preempt(second, "n4")
        jobs.release(second)
        assert jobs.ready("second")["restarts"] == 1

        run.allow(1, "first", "n2", "n2")
        cluster.kill_node("n2")
        cluster.wait_for(lambda: jobs.nodes("first")["n2"]["state"] == "dead")

        run.allow(2, "first", "n1", "n1")
        drained = jobs.run("rollout-service", "nodes", "drain", "n1", "--json", env=jobs.variables("second"))
        assert json.loads(drained)[0]["state"] == "draining"
        run.check_each_result_came_once()
        assert jobs.nodes("second")["n4-second"]["finished"] > 0
    for name in ("second", "first"):
        jobs.slurm("stop", name)
    cluster.wait_for_state(first, "COMPLETED", "NODE_FAIL")
    cluster.start_node("n2")
    check_nothing_is_left(cluster, before, ["n1", "n3", "n4"])
