"""The command line works against a real server with the embedded engine, each in its own process."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from api_schemas.events import Event
from api_schemas.rollouts import Rollout, RolloutState
from rollout_service.cli import app
from rollout_service.tokens.trajectory import check_invariants
from tests.support.processes.service import Running, running

pytestmark = pytest.mark.slow(seconds=180)

START_SECONDS = 120.0
COMMAND = [sys.executable, "-m", "rollout_service.cli"]
FLAGS = ["--sandbox", "local", "--model", "calc-tuned", "--init-workers", "2", "--log-level", "warning"]


@contextmanager
def serving(folder: Path, port: int = 0) -> Iterator[Running]:
    """Run `rollout-service serve` as a child process; kill it at the end of the block."""
    command = ["rollout_service.cli", "serve", *FLAGS, "--port", str(port), "--state-dir", str(folder)]
    with running("service", [*command, "--port-file", str(folder / "service.address")], folder) as found:
        found.wait_until_ready()
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server")) as found:
        yield found
        found.stop()
        found.ended(30)


def invoke(*arguments: str, url: str | None = None):
    variables = {"COLUMNS": "200"} | ({"ROLLOUT_URL": url} if url else {})
    return CliRunner().invoke(app, list(arguments), env=variables)


def tasks(path: Path, count: int) -> Path:
    lines = [
        {"task": {"environment": "calc", "instance": {"question": f"What is {n}+{n}?", "answer": 2 * n}}}
        for n in range(10, 10 + count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def results(path: Path) -> list[Rollout]:
    return [Rollout.model_validate_json(line) for line in path.read_text().splitlines()]


def test_the_engine_is_listed_and_can_be_drained_by_its_id(server):
    listed = invoke("backends", "list", "--json", url=server.url)
    assert listed.exit_code == 0
    (backend,) = json.loads(listed.stdout)
    assert backend["state"] == "ready"
    assert "calc-tuned" in invoke("backends", "list", "--json", url=server.url).stdout
    assert backend["backend_id"] in invoke("backends", "list", url=server.url).stdout

    unknown = invoke("backends", "drain", "nobody", url=server.url)
    assert unknown.exit_code == 1
    assert "nobody" in unknown.stderr


def test_environments_are_those_of_the_server(server):
    listed = invoke("env", "list", "--url", server.url, "--json")
    assert {spec["name"] for spec in json.loads(listed.stdout)} >= {"calc", "math", "code"}


def test_submit_gives_a_result_for_every_good_line_and_resumes(server, tmp_path):
    file, output = tasks(tmp_path / "tasks.jsonl", 4), tmp_path / "out.jsonl"
    lines = file.read_text().splitlines()
    unknown = lines[0].replace("calc", "clac")
    file.write_text("\n".join([lines[0], '{"task":', lines[1], unknown, lines[2], lines[3]]))

    first = invoke("submit", str(file), "-o", str(output), "--json", url=server.url)
    assert first.exit_code == 1
    assert "line 2: not JSON" in first.stderr
    assert "line 4: " in first.stderr
    assert "clac" in first.stderr
    assert json.loads(first.stdout)["refused"] == 2
    found = results(output)
    assert len({rollout.rollout_id for rollout in found}) == len(found) == 4
    for rollout in found:
        assert rollout.state is RolloutState.COMPLETED
        check_invariants(rollout.trajectory)

    # Lose half of the results, and truncate the last one.
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(whole[:2]) + whole[2][:50])
    second = invoke("submit", str(file), "-o", str(output), "--json", url=server.url)
    assert json.loads(second.stdout)["resumed"] == 2
    assert {rollout.rollout_id for rollout in results(output)} == {rollout.rollout_id for rollout in found}


def test_submit_reads_a_pipe_once_and_resumes_from_another(server, tmp_path):
    file, output = tasks(tmp_path / "tasks.jsonl", 2), tmp_path / "out.jsonl"
    submit = f"submit -o {output} --json --url {server.url}"
    program = f"{sys.executable} -m rollout_service.cli"
    ways = [f"{submit} <(cat {file})", f"{submit} /dev/stdin < <(cat {file})", f"{submit} - < {file}"]
    for resumed, way in zip((0, 2, 2), ways, strict=True):
        ran = subprocess.run(["bash", "-c", f"{program} {way}"], capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        assert json.loads(ran.stdout)["resumed"] == resumed
        assert len(results(output)) == 2


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_submit_of_nothing_is_an_error(server, tmp_path, content):
    file, output = tmp_path / "tasks.jsonl", tmp_path / "out.jsonl"
    file.write_text(content)
    result = invoke("submit", str(file), "-o", str(output), url=server.url)
    assert result.exit_code == 1
    assert "is empty" in result.stderr
    assert not output.exists()


def test_submit_fails_on_failed_rollouts_only_when_asked(server, tmp_path):
    file, output = tmp_path / "tasks.jsonl", tmp_path / "out.jsonl"
    request = {"task": {"environment": "calc", "instance": {"question": "1+1", "answer": 2}}}
    file.write_text(json.dumps(request | {"limits": {"rollout_seconds": 0.001}}) + "\n")
    result = invoke("submit", str(file), "-o", str(output), url=server.url)
    assert results(output)[0].state is RolloutState.FAILED
    assert result.exit_code == 0
    assert "1 result written" in result.stderr
    assert "1 failed or cancelled" in result.stderr
    again = tmp_path / "again.jsonl"
    assert invoke("submit", str(file), "-o", str(again), "--fail-on-error", url=server.url).exit_code == 1


@pytest.mark.parametrize(("sent", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_submit_says_how_to_continue(server, tmp_path, sent, exit_code):
    file, output = tasks(tmp_path / "tasks.jsonl", 200), tmp_path / "out.jsonl"
    command = [*COMMAND, "submit", str(file), "-o", str(output), "--concurrency", "2", "--url", server.url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as submit:
        deadline = time.monotonic() + START_SECONDS
        while not (output.exists() and output.read_bytes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        submit.send_signal(sent)
        _, said = submit.communicate(timeout=60)
    assert submit.returncode == exit_code
    assert f"Finished results are in {output}; run the same command again to continue." in said


def test_a_leased_batch_is_given_back_and_acknowledged_by_its_id(server, tmp_path):
    task = {"environment": "calc", "instance": {"question": "1+1", "answer": 2}}
    order = {"source": {"kind": "inline", "tasks": [task]}, "group_size": 1, "batch_size": 1, "filters": []}
    created = CliRunner().invoke(
        app, ["runs", "create", "-", "--run-id", "settled", "--url", server.url], input=json.dumps(order)
    )
    assert created.exit_code == 0, created.stderr
    output = tmp_path / "batch.json"
    lease = ["runs", "lease", "settled", "-o", str(output)]
    leased = invoke(*lease, url=server.url)
    assert leased.exit_code == 0, leased.stderr
    batch_id = leased.stdout.strip()
    assert f"rollout-service runs ack settled {batch_id}" in leased.stderr
    first = output.read_bytes()

    refused = invoke(*lease, url=server.url)
    assert refused.exit_code == 1
    assert "already exists" in refused.stderr
    assert output.read_bytes() == first

    assert invoke("runs", "nack", "settled", batch_id, url=server.url).exit_code == 0
    again = invoke(*lease, "--force", "--timeout", "0", url=server.url)
    assert again.stdout.strip() == batch_id
    assert json.loads(output.read_text())["delivery"] == 2
    acknowledged = invoke("runs", "ack", "settled", batch_id, url=server.url)
    assert acknowledged.exit_code == 0
    assert f"{batch_id}: acknowledged" in acknowledged.stderr
    assert invoke("runs", "show", "settled", "--json", url=server.url).exit_code == 0
    assert invoke("runs", "show", "settled", url=server.url).stdout.splitlines()[1].endswith("100%")
    atif = tmp_path / "settled.jsonl.gz"
    said = invoke("runs", "export", "settled", "--atif", "-o", str(atif), url=server.url)
    assert (said.exit_code, said.stdout) == (0, f"{atif}: 1 written, 0 left out\n")
    document = json.loads(gzip.decompress(atif.read_bytes()))
    assert document["schema_version"] == "ATIF-v1.8"
    assert all(step["metrics"]["completion_token_ids"] for step in document["steps"] if step["source"] == "agent")
    over = invoke("runs", "lease", "settled", "-o", str(tmp_path / "next.json"), url=server.url)
    assert over.exit_code == 1


def test_rescore_reads_a_pipe_and_reports_empty_input(server, tmp_path):
    order = {"source": {"kind": "inline", "open": True}, "group_size": 1, "batch_size": 1}
    created = CliRunner().invoke(
        app, ["runs", "create", "-", "--run-id", "bare", "--url", server.url], input=json.dumps(order)
    )
    assert created.exit_code == 0, created.stderr
    shown = invoke("runs", "show", "bare", url=server.url).stdout.splitlines()[1]
    assert shown.endswith(" -"), "no group, so no share of groups that were kept"
    export = tmp_path / "bare.jsonl"
    assert invoke("runs", "export", "bare", "-o", str(export), url=server.url).exit_code == 0
    for what in ("bare", str(export), "-"):
        arguments = ["runs", "rescore", what, "--url", server.url]
        result = CliRunner().invoke(app, arguments, input=export.read_text())
        assert result.exit_code == 1
        assert "Nothing was evaluated" in result.stderr
    invoke("runs", "end", "bare", url=server.url)


def test_watch_prints_events_as_they_happen(server, tmp_path):
    command = [*COMMAND, "watch", "--url", server.url, "--json", "--after", "0"]
    file, output = tasks(tmp_path / "watched.jsonl", 1), tmp_path / "out.jsonl"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        try:
            assert invoke("submit", str(file), "-o", str(output), url=server.url).exit_code == 0
            (rollout,) = results(output)
            states = []
            while "completed" not in states:
                event = Event.model_validate_json(watch.stdout.readline())
                if event.subject == rollout.rollout_id and event.kind == "rollout.state":
                    states.append(event.data["state"])
            assert states == ["queued", "init", "rollout", "evaluate", "completed"]
        finally:
            watch.terminate()


def test_watch_prints_the_state_without_a_terminal(server):
    command = [*COMMAND, "watch", "--url", server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        try:
            assert "1 engine," in watch.stdout.readline()
        finally:
            watch.terminate()


def test_env_run_shows_a_whole_trajectory(server):
    instance = '{"question": "What is 12*7?", "answer": 84}'
    result = invoke("env", "run", "calc", "--instance", instance, "--url", server.url)
    assert result.exit_code == 0, result.stderr
    for part in ("context, mask 0", "mask 1", "logprobs: ", "<tool_call>", "<tool_response>", "12*7"):
        assert part in result.stdout
    missing = invoke("env", "run", "calc", "--index", "100000", "--url", server.url)
    assert missing.exit_code == 1
    assert "no instance with index 100000" in missing.stderr


def test_env_run_says_that_there_is_no_data_set(tmp_path):
    (tmp_path / "environment.toml").write_text('name = "e"\nimage = "base"\n[evaluate]\ncommand = "true"\n')
    result = invoke("env", "run", str(tmp_path), "--sandbox", "local")
    assert result.exit_code == 1
    assert "e has no data set" in result.stderr
    assert "--instance" in result.stderr


def test_a_new_environment_rewards_its_own_solution_and_nothing_less(tmp_path):
    assert invoke("env", "new", "word-count", "--folder", str(tmp_path)).exit_code == 0
    folder, lazy = tmp_path / "word-count", tmp_path / "lazy.jsonl"
    lazy.write_text('{"tool_calls": [{"name": "finish"}]}\n')
    for script, reward in ((folder / "solution.jsonl", 1.0), (lazy, 0.0)):
        flags = ["--script", str(script), "--sandbox", "local", "--json"]
        result = invoke("env", "run", str(folder), *flags)
        assert result.exit_code == 0, result.stderr
        rollout = Rollout.model_validate_json(result.stdout)
        assert rollout.reward == reward
        assert rollout.stop_reason == "finished"


def test_env_run_shows_what_its_server_warns_about(tmp_path):
    assert invoke("env", "new", "word-count", "--folder", str(tmp_path)).exit_code == 0
    folder = tmp_path / "word-count"
    (folder / "grade.py").write_text("raise ValueError('no such file')")
    result = invoke("env", "run", str(folder), "--script", str(folder / "solution.jsonl"), "--sandbox", "local")
    assert result.exit_code == 1
    assert "attempt failed" in result.stderr
    assert "no such file" in result.stderr


def test_submit_survives_a_kill_of_the_server(tmp_path):
    file, output = tasks(tmp_path / "tasks.jsonl", 12), tmp_path / "out.jsonl"
    with serving(tmp_path) as server:
        command = [*COMMAND, "submit", str(file), "-o", str(output), "--url", server.url]
        submit = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + START_SECONDS
        while not (output.exists() and output.read_bytes()) and time.monotonic() < deadline:
            time.sleep(0.01)
        server.stop(signal.SIGKILL)
        server.ended(30)
    try:
        with serving(tmp_path, httpx.URL(server.url).port):
            _, stderr = submit.communicate(timeout=120)
    finally:
        submit.kill()
        submit.wait()
    assert submit.returncode == 0, stderr
    found = results(output)
    assert len({rollout.rollout_id for rollout in found}) == len(found) == 12
    assert {rollout.state for rollout in found} == {RolloutState.COMPLETED}


def test_a_demo_without_isolation_succeeds(tmp_path):
    figures, output = tmp_path / "figures.json", tmp_path / "batch.jsonl"
    arguments = ["--sandbox", "local", "--rollouts", "8", "--state-dir", str(tmp_path / "state")]
    result = invoke("demo", *arguments, "--output", str(output), "--json", str(figures))
    assert result.exit_code == 0, result.stderr
    assert "every trajectory passes the invariants (8 checked)" in result.stderr
    assert str(output) in result.stdout.replace("\n", "")
    document = json.loads(figures.read_text())
    assert set(document) == {"machine", "settings", "figures"}
    assert document["figures"]["rollouts"] == len(results(output)) == 8
    assert document["figures"]["success_rate"] >= 0.5, "one in fifty fails by chance, and eight are few"


def test_the_figures_of_a_demo_can_be_printed(tmp_path):
    flags = ["--sandbox", "local", "--rollouts", "1", "--policy", "calc-base", "--state-dir", str(tmp_path)]
    result = invoke("demo", "--json", *flags)
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["figures"]["rollouts"] == 1
    refused = invoke("demo", "figures.json")
    assert refused.exit_code == 1
    assert "--json figures.json" in refused.stderr


@pytest.mark.parametrize(("sent", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_demo_that_is_ended_leaves_no_server(tmp_path, sent, exit_code):
    command = [*COMMAND, "demo", "--sandbox", "local", "--rollouts", "500", "--state-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as demo:
        address = tmp_path / "address"
        deadline = time.monotonic() + START_SECONDS
        while not address.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        url = address.read_text()
        demo.send_signal(sent)
        assert demo.wait(timeout=60) == exit_code
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            httpx.get(f"{url}/health")
        except httpx.ConnectError:
            return
        except httpx.TransportError:
            pass  # it ended while it answered
        time.sleep(0.05)
    pytest.fail("the server still answers")


def test_a_server_that_cannot_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_PIPELIN__ROLLOUT_WORKERS", "4")
    result = invoke("demo", "--sandbox", "local", "--rollouts", "1", "--state-dir", str(tmp_path))
    assert result.exit_code == 1
    assert "ROLLOUT_PIPELINE__ROLLOUT_WORKERS" in result.stderr


def test_doctor_says_what_it_found(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLOUT_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("ROLLOUT_IMAGES_DIR", str(tmp_path / "no images"))
    monkeypatch.setenv("ROLLOUT_APPTAINER", "/nowhere/apptainer")
    result = invoke("doctor", "--json")
    assert result.exit_code == 1
    checks = {check["name"]: check for check in json.loads(result.stdout)}
    assert checks["image base"]["state"] == "missing"
    assert checks["image base"]["fix"] == "rollout-service image build base"
    assert checks["Apptainer"]["state"] == "missing"
    assert checks["Apptainer"]["fix"].endswith(f"{os.sep}install-apptainer")
    assert "rollout-service image build base" in invoke("doctor").stdout
