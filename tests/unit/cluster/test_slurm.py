"""Jobs of Slurm: times and limits are read as Slurm writes them, children and tunnels live as long as they should."""

import shlex
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import pytest
from aiohttp import web
from pydantic import ValidationError
from typer.testing import CliRunner

from rollout_service.base.errors import ConfigurationError
from rollout_service.cli import app
from rollout_service.cluster.slurm import commands, supervisor
from rollout_service.cluster.slurm.children import ENDED_BY_SLURM, EndRequests, KeptProcess
from rollout_service.cluster.slurm.commands import PartitionNode, QueuedJob, _partition_node
from rollout_service.cluster.slurm.folder import JobFolder, Published, Submitted
from rollout_service.cluster.slurm.limits import check_fits
from rollout_service.cluster.slurm.node import JobNode
from rollout_service.cluster.slurm.relay import relay
from rollout_service.cluster.slurm.scaler import spec_of_more
from rollout_service.cluster.slurm.spec import Engines, JobSpec, Resources, minutes_of, render
from sandboxes.host.ports import free_port
from tests.support.engines.pools import answering
from tests.support.waiting import until

EXAMPLES = Path(__file__).parents[3] / "deploy/slurm"
PYTHON = "/shared/rollout-service/.venv/bin/python"
ENGINE = "python -m sglang.launch_server --model-path MODEL --host {host} --port {port}"
SPECS = {
    "one-node": JobSpec(name="one-node", resources=Resources(gpus=1), engines={"command": ENGINE}, python=PYTHON),
    "engines-apart": JobSpec(
        name="engines-apart",
        resources=Resources(partition="cpu", cpus=32, memory="128G"),
        engines={"command": ENGINE, "per_node": 4, "resources": {"nodes": 2, "partition": "gpu", "gpus": 4}},
        python=PYTHON,
    ),
    "many-nodes": JobSpec(
        name="many-nodes",
        resources=Resources(nodes=3, partition="cpu"),
        backends=["http://gpu-1:30000"],
        python=PYTHON,
    ),
}


@pytest.mark.parametrize(
    ("written", "minutes"),
    [
        ("30", 30),
        ("30:30", 30.5),
        ("1:00:00", 60),
        ("2-0", 2_880),
        ("2-12", 3_600),
        ("1-00:30", 1_470),
        ("1-00:00:30", 1_440.5),
        ("infinite", None),
    ],
)
def test_limits_of_time_are_read_as_slurm_writes_them(written, minutes):
    assert minutes_of(written) == minutes


@pytest.mark.parametrize("name", SPECS)
def test_the_examples_are_what_the_command_renders(name):
    script = render(SPECS[name], Path("/shared/rollout-jobs") / name)
    assert (EXAMPLES / f"{name}.sbatch").read_text() == script


def test_every_example_is_listed_with_its_layout():
    readme = (EXAMPLES / "README.md").read_text()
    assert {path.name for path in EXAMPLES.glob("*.sbatch")} >= {f"{name}.sbatch" for name in SPECS}
    assert all(f"]({path.name})" in readme for path in EXAMPLES.glob("*.sbatch"))


@pytest.mark.parametrize("gres", ["gpu:4", "gpu:a100:4", "gpu:a100:4(S:0-1)", "nic:1,gpu:4"])
def test_a_node_is_read_with_its_gpus(gres):
    node = _partition_node(f"n1|main*|up|64+|256000+|{gres}|1-00:00:00")
    assert node == PartitionNode("n1", "main", True, True, 64, 256_000, 4, "1-00:00:00")


def test_one_large_node_does_not_make_room_for_two():
    nodes = [
        PartitionNode("n1", "main", True, True, 64, 1_000, 0, "infinite"),
        PartitionNode("n2", "main", True, True, 8, 1_000, 0, "infinite"),
    ]
    check_fits(JobSpec(name="a", resources={"cpus": 64}), nodes)
    apart = {"command": ENGINE, "resources": {"nodes": 2, "cpus": 9}}
    with pytest.raises(ConfigurationError, match="1 such nodes of 2"):
        check_fits(JobSpec(name="a", engines=apart), nodes)


def test_jobs_of_more_nodes_are_an_array_whose_folders_end_with_their_numbers():
    script = render(JobSpec(name="a-more"), Path("/my jobs/a-more"), slots=[2, 5])
    assert "#SBATCH --job-name=a-more\n#SBATCH --array=2,5\n" in script
    assert '#SBATCH --output="/my jobs/a-more-%a/logs/job-%j.log"\n' in script
    assert script.endswith("""slurm run '/my jobs/a-more'-"$SLURM_ARRAY_TASK_ID"\n""")


async def test_the_tasks_of_a_script_are_read_from_the_queue(monkeypatch):
    said = """17_2|2|RUNNING|1:05:30|/my|jobs/more.sh
17_5|5|PENDING|4:00:00|/my|jobs/more.sh
18_1|1|COMPLETING|INVALID|/my|jobs/more.sh
19_1|1|RUNNING|UNLIMITED|/my|jobs/more.sh
20_1|1|RUNNING|9:00|/other/more.sh
21|N/A|RUNNING|9:00|/my|jobs/more.sh
"""

    async def run(command: Sequence[str]) -> str:
        assert command[0] == "squeue"
        return said

    monkeypatch.setattr(commands, "run", run)
    assert await commands.queued_jobs(Path("/my|jobs/more.sh")) == [
        QueuedJob("17_2", 2, "RUNNING", 3_930.0),
        QueuedJob("17_5", 5, "PENDING"),
        QueuedJob("18_1", 1, "COMPLETING"),
        QueuedJob("19_1", 1, "RUNNING", None),
    ]


async def test_a_controller_that_does_not_answer_is_asked_again_to_requeue_the_job(tmp_path, monkeypatch):
    asked = []

    async def run(command: Sequence[str]) -> str:
        asked.append(command[1])
        if len(asked) in (1, 3):
            raise ConfigurationError("Unable to contact slurm controller")
        return "JobId=7 JobState=RUNNING Reason=None"

    monkeypatch.setattr(commands, "run", run)
    monkeypatch.setattr(supervisor, "REQUEUE_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    await supervisor.Supervisor(JobFolder(tmp_path), JobSpec(name="job"))._requeue()
    assert asked == ["--oneliner", "--oneliner", "requeue", "--oneliner", "requeue"]


def test_more_nodes_are_like_the_first_without_its_engines_gpus_and_options(folder):
    resources = {"cpus": 8, "gpus": 2, "partition": "gpu", "directives": ["--nodelist=n1"]}
    first = JobSpec(
        name="mine",
        joinable=True,
        resources=resources,
        engines={"command": ENGINE},
        flags=["--sandbox=local"],
    )
    folder.save(Submitted(job="1", spec=first))
    more = spec_of_more(folder, {"partition": "low", "memory": None}, {"time": "1:00:00", "qos": None})
    assert (more.name, more.join, more.flags) == ("mine-more", folder.path, ["--sandbox=local"])
    assert more.resources == Resources(cpus=8, partition="low")
    assert (more.engines, more.time, more.shares_a_redis, more.starts_a_redis) == (
        None,
        "1:00:00",
        True,
        False,
    )
    assert first.starts_a_redis


@pytest.mark.parametrize("command", ["serve --model 'my model --port {port}", "serve --host {host}"])
def test_an_engine_that_no_node_could_start_is_refused(command):
    with pytest.raises(ValidationError):
        Engines(command=command)


def test_a_value_cannot_add_a_line_to_the_script():
    for values in ({"time": "1:00\nrm"}, {"account": "a b"}, {"name": "$(id)"}):
        with pytest.raises(ValueError):
            JobSpec(**({"name": "a"} | values))
    with pytest.raises(ValueError):
        Resources(directives=["--comment=a\nrm -r /"])


def flags_of(folder: JobFolder, spec: JobSpec, name: str, slot: int, redis_url: str | None) -> KeptProcess:
    """Return how the service is started on a node."""
    node = JobNode(folder, spec, folder.path / "scratch", name, slot, folder, spec, EndRequests("node"))
    return node._child("10.0.0.1", redis_url)


async def test_the_state_of_a_service_outlasts_its_job_and_its_node(tmp_path):
    folder = JobFolder(tmp_path)
    alone = flags_of(folder, SPECS["one-node"], "n1", 0, None)
    assert f"{tmp_path}/state" in alone.command
    assert alone.environment["ROLLOUT_STORE__DISK"] == "network", "other hosts see the job's folder"
    redis = "redis://10.0.0.1:1/0"
    nodes = [flags_of(folder, SPECS["many-nodes"], f"n{slot}", slot, redis) for slot in range(2)]
    requeued = flags_of(folder, SPECS["many-nodes"], "n7", 0, redis)
    states = [child.command[child.command.index("--state-dir") + 1] for child in (*nodes, requeued)]
    assert states == [f"{tmp_path}/state/node-0", f"{tmp_path}/state/node-1", f"{tmp_path}/state/node-0"]


@pytest.mark.parametrize(
    ("signal_seconds", "setting", "drains"),
    [(120, None, 10), (10, None, 5), (120, 60, 60), (90, 60, 60), (89, 60, None), (40, 12, 12)],
)
def test_services_drain_for_no_longer_than_their_job_has(tmp_path, signal_seconds, setting, drains):
    """None for a job that is refused."""
    config = tmp_path / "rollout.toml"
    config.write_text("" if setting is None else f"[pipeline]\ndrain_seconds = {setting}\n")
    spec = JobSpec(name="a", signal_seconds=signal_seconds, config=config)
    submit = ["slurm", "submit", "--dry-run", "--drain", str(signal_seconds), "--config", str(config)]
    said = CliRunner().invoke(app, [*submit, "--folder", str(tmp_path)])
    assert (said.exit_code == 0) == (drains is not None), said.output
    if drains is None:
        assert "hint: Pass --drain 90" in said.output
    else:
        variables = flags_of(JobFolder(tmp_path), spec, "n1", 0, None).environment
        assert float(variables["ROLLOUT_PIPELINE__DRAIN_SECONDS"]) == drains


@pytest.mark.parametrize("folder", ["/my jobs/a", '/jobs #1/it\'s "a"', "/100%job/a"])
def test_a_folder_may_have_any_name_that_sbatch_can_read(folder):
    script = render(JobSpec(name="a"), Path(folder))
    [line] = [line for line in script.splitlines() if "--output=" in line]
    assert shlex.split(line.removeprefix("#SBATCH"), comments=True) == [  # sbatch has the same backslashes
        f"--output={folder.replace('%', '%%')}/logs/job-%j.log"
    ]
    assert shlex.split(script.splitlines()[-1])[-1] == folder


@pytest.mark.parametrize("folder", ["/jobs\n#SBATCH --uid=0", "/jobs\\a"])
def test_a_folder_that_a_script_cannot_name_is_refused(folder):
    with pytest.raises(ConfigurationError, match="line break or a backslash"):
        render(JobSpec(name="a"), Path(folder))


@pytest.mark.slow
async def test_a_child_that_fails_is_started_again_and_ends_when_asked(tmp_path):
    script = f"echo run >>{tmp_path}/runs; test $(wc -l <{tmp_path}/runs) -gt 1 && exec sleep 100; exit 3"
    child = KeptProcess("a", ["sh", "-c", script], tmp_path / "log", 5.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(child.keep_running)
        await until(lambda: (tmp_path / "runs").exists() and (tmp_path / "runs").read_text().count("run") >= 2, 30)
        child.stopping.set()


async def test_a_child_that_ended_for_good_is_not_started_again(tmp_path):
    assert await KeptProcess("a", ["true"], tmp_path / "log", 5.0).keep_running() == 0
    ended = ["sh", "-c", "exit 75"]
    final = frozenset({ENDED_BY_SLURM})
    assert await KeptProcess("a", ended, tmp_path / "log", 5.0, final_codes=final).keep_running() == 75


PART = """
import signal
import anyio
from rollout_service.cluster.slurm.children import EndRequests

async def main():
    ending = EndRequests("a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ending.follow)
        while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            await anyio.sleep(0.01)
        print("listening", flush=True)
        await ending.stopping.wait()
        await anyio.sleep(0.2)  # a second signal does not cut the drain short
        tasks.cancel_scope.cancel()
    print("drained", flush=True)
    raise SystemExit(ending.exit_code)

anyio.run(main)
"""


@pytest.mark.slow
async def test_the_end_of_its_input_asks_a_part_to_end_and_no_signal_is_sent(tmp_path):
    output = tmp_path / "log"
    child = KeptProcess("a", [sys.executable, "-c", PART], output, 30.0, ends_with_input=True)
    child.stopping.set()  # before it has begun to listen: nothing is lost
    with anyio.fail_after(60):
        assert await child.run_once() == 0
    said = output.read_text()
    assert "its input has ended" in said
    assert "drained" in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_part_also_ends_when_slurm_signals_its_step(number):
    with subprocess.Popen([sys.executable, "-c", PART], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"listening\n"
        process.send_signal(number)
        process.send_signal(number)
        assert process.wait(60) == ENDED_BY_SLURM  # its input is still open
        assert b"drained" in process.stdout.read()


async def test_a_tunnel_leads_to_the_node_that_answers(folder):
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as dead:
        gone = dead.extra(anyio.abc.SocketAttribute.local_port)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    folder.publish("nodes", Published(name="n1", url="http://127.0.0.1:1"))
    folder.publish("nodes", Published(name="n2", url=f"http://127.0.0.1:{port}"))

    async def echo(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            async for data in stream:
                await stream.send(data.upper())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, echo)
        ready = anyio.Event()
        tasks.start_soon(relay, folder, gone, ready)
        await ready.wait()
        async with await anyio.connect_tcp("127.0.0.1", gone) as stream:
            await stream.send(b"through")
            with anyio.fail_after(10):
                assert await stream.receive() == b"THROUGH"
        tasks.cancel_scope.cancel()
    await listener.aclose()


def reset(stream: anyio.abc.SocketStream) -> None:
    """Make the end of a connection a reset, as when its process is killed."""
    raw = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True}), ("asyncio", {})], ids=str)
@pytest.mark.parametrize("broken", ["client", "node", "both"])
async def test_a_tunnel_outlives_connections_that_break(folder, broken):
    resets = True

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            if resets and broken != "client":
                reset(stream)
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await stream.receive()
                for _ in range(20 if resets else 1):
                    await stream.send(b"answer" * 1_000)

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    folder.publish("nodes", Published(name="n1", url=f"http://127.0.0.1:{port}"))
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        own, ready = free_port(), anyio.Event()
        tasks.start_soon(relay, folder, own, ready)
        await ready.wait()
        for _ in range(20):
            async with await anyio.connect_tcp("127.0.0.1", own) as stream:
                if broken != "node":
                    reset(stream)
                with suppress(anyio.BrokenResourceError):
                    await stream.send(b"question")
        resets = False
        with anyio.fail_after(10):
            async with await anyio.connect_tcp("127.0.0.1", own) as stream:
                await stream.send(b"question")
                assert (await stream.receive()).startswith(b"answer")
        tasks.cancel_scope.cancel()


async def test_a_tunnel_refuses_a_port_that_is_taken(tmp_path):
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as taken:
        port = taken.extra(anyio.abc.SocketAttribute.local_port)
        with pytest.raises(ConfigurationError, match=f"port {port} cannot be used"):
            await relay(JobFolder(tmp_path), port)


def test_a_folder_is_private_and_keeps_its_key(folder):
    key = folder.key
    folder.create()
    assert folder.key == key
    assert folder.path.stat().st_mode & 0o077 == folder.key_file.stat().st_mode & 0o077 == 0


async def test_a_trainer_that_does_not_end_keeps_no_job_from_the_queue(folder, tmp_path, monkeypatch):
    started = tmp_path / "started"
    trainer = ["bash", "-c", f"trap '' TERM; touch {started}; while sleep 0.05; do :; done"]
    job = supervisor.Supervisor(folder, JobSpec(name="job", trainer=trainer))

    async def ready() -> str:
        return "http://127.0.0.1:1"

    monkeypatch.setattr(job, "_ready_address", ready)
    monkeypatch.setattr(supervisor, "TRAINER_SECONDS", 0.1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(job._train)
        await until(started.exists)
        tasks.cancel_scope.cancel()


async def test_an_engine_that_the_service_refuses_keeps_no_other_from_it(folder):
    asked = []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response([])
        asked.append((await request.json())["url"].rstrip("/"))
        return web.json_response({"status": 502, "code": "backend_unreachable", "title": "gone"}, status=502)

    urls = [f"http://n{number}:30000" for number in (1, 2)]
    for number, url in enumerate(urls):
        folder.publish("engines", Published(name=str(number), url=url))
    async with answering(answer) as server:
        await supervisor.Registrar(folder)._register(server.url)
    assert asked == urls


def test_the_line_of_a_tunnel_is_for_a_shell_whatever_the_folder_is_called(tmp_path, monkeypatch):
    async def relay_nothing(folder: JobFolder, port: int, listening: anyio.Event) -> None:
        listening.set()

    monkeypatch.setattr("rollout_service.cluster.slurm.relay.relay", relay_nothing)
    folder = JobFolder(tmp_path / "of me")
    folder.create("the-key")
    (folder.path / "job.json").touch()
    line = CliRunner().invoke(app, ["slurm", "tunnel", str(folder.path)]).stdout
    shell = subprocess.run(["bash", "-c", f"{line}echo $ROLLOUT_KEY"], capture_output=True, text=True, check=True)
    assert shell.stdout == "the-key\n"
