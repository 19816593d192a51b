"""The service as jobs of a real Slurm, by the command line of one user on the login machine."""

import json
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, STDOUT

import psutil

from tests.support.processes.service import ENVIRONMENT
from tests.support.slurm.cluster import SlurmCluster

SCRIPTED_ENGINE = "python -m rollout_service.testing --delay {delay} --host {{host}} --port {{port}}"
READY_SECONDS = 240
"""On a busy machine, SGLang starts in minutes."""
END_SECONDS = 10.0
TUNNEL_PORT = 8080
ENDED = """
import json, os, sys, redis
client = redis.Redis.from_url(sys.argv[1], password=os.environ["PASSWORD"], decode_responses=True)
for _, fields in client.xrange(sys.argv[2], "-", "+"):
    if fields["k"] == "rollout.state":
        print(fields["s"], json.loads(fields["d"])["state"])
"""


class Jobs:
    """The jobs of one user; None is whoever runs the cluster."""

    def __init__(self, cluster: SlurmCluster, user: int | None = None) -> None:
        self.cluster, self.user = cluster, user
        self.home = cluster.root / "shared" / str(user or "own")
        self.folder = self.home / "my jobs"
        self.scratch = self.home / "scratch"
        self.scratch.mkdir(parents=True)
        environment = self.home / "echo"
        environment.mkdir()
        (environment / "environment.toml").write_text(ENVIRONMENT.format(turns=1))
        if user is not None:
            os.chown(self.home, user, user)
            os.chown(self.scratch, user, user)

    def run(self, *command: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
        """Run a command to its end, and return what it prints."""
        variables = {"HOME": str(self.home)} | dict(env or {})
        done = self.cluster.run(*command, user=self.user, check=check, env=variables)
        return done.stdout if check else done.stdout + done.stderr

    def slurm(self, command: str, *arguments: str, check: bool = True) -> str:
        """Run a command of `rollout-service slurm`, and return what it prints."""
        line = ["rollout-service", "slurm", command, "--folder", str(self.folder), *arguments]
        return self.run(*line, check=check)

    def submit(self, name: str, *arguments: str, delay: float = 0.0) -> str:
        """Submit a job with sandboxes that isolate nothing, and an engine with a script; return the job's id."""
        flags = [
            "--scratch",
            str(self.scratch),
            "--serve-flag=--sandbox=local",
            f"--serve-flag=--environment={self.home}/echo",
        ]
        own = "--backend" in arguments or "--join" in arguments
        flags += [] if own else ["--engine-command", SCRIPTED_ENGINE.format(delay=delay)]
        return self.submit_plain(name, *flags, *arguments)

    def submit_plain(self, name: str, *arguments: str) -> str:
        """Submit a job, and return its id."""
        asked = ["--name", name, "--cpus", "1", "--time", "10", "--json", *arguments]
        return json.loads(self.slurm("submit", *asked))["job"]

    def status(self, name: str) -> dict:
        """Return what is known of a job now."""
        return json.loads(self.slurm("status", name, "--json"))

    def ready(self, name: str) -> dict:
        """Wait until a job can take work, and return what is known of it."""
        said = self.slurm("status", name, "--wait", str(READY_SECONDS), "--json", check=False)
        found = json.loads(said)
        assert found["url"], said + self.slurm("logs", name, check=False) + self.cluster.log()
        return found

    def variables(self, name: str) -> dict[str, str]:
        """Return the variables with which clients reach a job, once it is ready."""
        found = self.ready(name)
        return {"ROLLOUT_URL": found["url"], "ROLLOUT_KEY": Path(found["key_file"]).read_text()}

    def roll_out(self, name: str, count: int, url: str | None = None) -> list[dict]:
        """Submit rollouts with the client's command, perhaps at another URL, and return the results."""
        tasks, results = self.home / f"{name}.tasks", self.results(name)
        tasks.write_text("".join(json.dumps({"number": number}) + "\n" for number in range(count)))
        line = ["rollout-service", "submit", str(tasks), "-o", str(results), "--environment", "echo"]
        self.run(*line, env=self.variables(name) | ({"ROLLOUT_URL": url} if url else {}))
        return [json.loads(line) for line in results.read_text().splitlines()]

    def results(self, name: str) -> Path:
        """Return the file to which `roll_out` appends the results as they come."""
        return self.home / f"{name}.results"

    def ends(self, name: str) -> Counter[str]:
        """Return how often each rollout has ended, by the events in the job's Redis."""
        redis = self.folder / name / "redis"
        password = {"PASSWORD": (redis / "password").read_text()}
        line = ["python", "-c", ENDED, (redis / "address").read_text(), f"{{{name}}}:events"]
        events = [line.split() for line in self.run(*line, env=password).splitlines()]
        return Counter(rollout for rollout, state in events if state in ("completed", "failed", "cancelled"))

    @contextmanager
    def tunnel(self, name: str) -> Iterator[str]:
        """Yield a URL that leads to a job for the block, also after it has moved."""
        line = ["slurm", "tunnel", name, "--folder", str(self.folder), "--port", str(TUNNEL_PORT)]
        with self.running("rollout-service", *line):
            yield f"http://127.0.0.1:{TUNNEL_PORT}"

    def nodes(self, name: str) -> dict[str, dict]:
        """Return the nodes that share a job's Redis, by name."""
        said = self.run("rollout-service", "nodes", "list", "--json", env=self.variables(name))
        return {node["node"]: node for node in json.loads(said)["nodes"]}

    def preempt(self, job: str, node: str) -> None:
        """Take a node from a job for something urgent, and wait until the job waits and the node is free again."""
        urgent = ["sbatch", "--parsable", "-p", "main", "-w", node, "--exclusive", "-o", "/dev/null"]
        other = self.cluster.run(*urgent, "--wrap", "sleep 2").stdout.strip()
        self.cluster.wait_for_state(job, "PENDING", "REQUEUED")
        self.cluster.wait_for_state(other, "COMPLETED")

    def release(self, job: str) -> None:
        """Wait until a requeued job runs: a node does not launch it again in the second in which it ended it, so
        Slurm holds it for two minutes.
        """

        def runs() -> bool:
            self.cluster.run("scontrol", "update", f"jobid={job}", "StartTime=now", check=False)
            return self.cluster.state(job) == "RUNNING"

        self.cluster.wait_for(runs, show=f"{job} is not launched again")

    @contextmanager
    def running(self, *command: str, env: Mapping[str, str] | None = None) -> Iterator[psutil.Popen]:
        """Run a command on the login machine within the block; its output can be read."""
        variables = self.cluster.environment | {"HOME": str(self.home)} | dict(env or {})
        line = self.cluster.network.command(["sh", "-c", f"exec {shlex.join(command)}"], self.user)
        process = psutil.Popen(line, stdout=PIPE, stderr=STDOUT, text=True, env=variables, cwd="/")
        try:
            yield process
        finally:
            with suppress(psutil.NoSuchProcess):  # it has ended by itself
                for child in [*process.children(recursive=True), process]:
                    child.terminate()
            try:
                process.communicate(timeout=END_SECONDS)
            except BaseException:
                process.kill()
                process.communicate()
                raise
