"""Ten secrets of an environment, by variable and by file, are in no output of a service but where they are declared."""

import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvicorn
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.rollouts import Rollout, RolloutRequest
from rollout_service.backup import Places, make_backup
from rollout_service.settings import Settings
from rollout_service.testing import ScriptedEngine
from tests.support.gateway.service import GatewayService, gateway_service, scripted
from tests.support.hangs.service import engine_of
from tests.support.logging_of_service import logged
from tests.support.otel.collector import Collector, attributes, collector
from tests.support.turns import called
from tests.support.waiting import until

pytestmark = pytest.mark.slow(seconds=60)

STAGES = (
    "SANDBOX",
    "SANDBOX",
    "SANDBOX",
    "INIT",
    "INIT",
    "INIT",
    "EVALUATE",
    "EVALUATE",
    "EVALUATE",
    "EVALUATE",
)
FILES = {2, 5, 9}
"""The numbers of the secrets that are files."""
NAMES_A_PART = 6
"""The number of the secret that the grader uses as the name of a part of its reward."""
PEM = "-----BEGIN KEY-----\nMIIBVgIBADANBgk{number}\nqhkiG9w0BAQEFAAS{number}\n-----END KEY-----"
RUN = "planted"
FAILURES = ("evaluate", "init")
ENVIRONMENT = """
name = "secretive"
image = "base"
prompt = "Do what you like."
tools = ["bash", "finish"]
[limits]
max_turns = 4
[sandbox]
secrets = {{ {SANDBOX} }}
[init]
command = "bash /environment/init"
secrets = {{ {INIT} }}
[evaluate]
command = "bash /environment/evaluate"
secrets = {{ {EVALUATE} }}
"""
INIT = """
sleep 600 >/dev/null 2>&1 &
env
env >&2
! grep -q '"fail": "init"' "$ROLLOUT_INSTANCE"
"""
EVALUATE = """
env
env >&2
printf '%s\\n' "$(printenv SECRET_6)" "$(printenv SECRET_9)"
touch "{folder}/grading"
until [ -e "{folder}/grade" ]; do sleep 0.05; done
! grep -q '"fail": "evaluate"' "$ROLLOUT_INSTANCE" || exit 3
echo "{{\\"reward\\": 1.0, \\"parts\\": {{\\"$SECRET_6\\": 1.0}}}}" >"$ROLLOUT_RESULT"
"""
"""A grader that is careless with its keys."""
LOOK = """
env
cat /proc/self/environ | tr '\\0' '\\n'
export -p
for number in 0 1 2 3 4 5 6 7 8 9; do
  name="SECRET_$number"; [ -n "${{!name}}" ] && echo "$number=$(printf '%s' "${{!name}}" | sha256sum)"
done
{{ env; cat /proc/self/environ /proc/$PPID/environ; grep -r . "$HOME"; }} >>"{folder}/seen" 2>/dev/null
for one in /proc/[0-9]*; do
  tr '\\0' '\\n' <$one/environ 2>/dev/null | grep -q '^SECRET_[3-9]=' && echo "a process has the secrets of others"
done
touch "{folder}/looking"
until [ -e "{folder}/go" ]; do sleep 0.05; done
"""


def value(number: int) -> str:
    if number == NAMES_A_PART:
        return f"planted-{number}-plain"
    return PEM.format(number=number) if number in FILES else f"planted-{number}-'\"$x"


def source(number: int) -> str:
    kind = f'file = "key-{number}.pem"' if number in FILES else f'variable = "HOST_{number}"'
    return f"SECRET_{number} = {{ {kind} }}"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Return what this process logs, down to the level of debug, as a service does."""
    with logged() as text:
        yield text


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collector() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        yield running


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Write the environment and its secrets; return the settings of a service that has them."""
    environment, keys = folder / "secretive", folder / "keys"
    environment.mkdir()
    keys.mkdir()
    tables = {
        name: ", ".join(source(number) for number, stage in enumerate(STAGES) if stage == name) for name in set(STAGES)
    }
    (environment / "environment.toml").write_text(ENVIRONMENT.format(**tables))
    (environment / "init").write_text(INIT)
    (environment / "evaluate").write_text(EVALUATE.format(folder=folder))
    for number in range(len(STAGES)):
        if number in FILES:
            (keys / f"key-{number}.pem").write_text(value(number) + "\n")
        else:
            monkeypatch.setenv(f"HOST_{number}", value(number))
    variables = [f"HOST_{number}" for number in range(len(STAGES)) if number not in FILES]
    return {"environments": [environment], "secrets": {"variables": variables, "folder": keys}}


async def gather(service: GatewayService, moment: str, rollouts: list[str]) -> dict[str, bytes]:
    """Return the answers of all routes that can be read, by their paths."""
    routes = [
        path
        for path, methods in service.app.openapi()["paths"].items()
        if "get" in methods and not path.endswith("/stream")
    ]
    known = {
        "rollout_id": rollouts,
        "run_id": [RUN],
        "name": ["secretive"],
        "number": ["1"],
        "session_id": ["none"],
    }
    found: dict[str, bytes] = {}
    async with service.http(60) as http:
        for path in [one for route in routes for one in filled(route, known)]:
            query = {"follow": "false"} if path == "/v1/events" else {}
            query |= {"trajectory": "true"} if re.fullmatch(r"/v1/rollouts/[^/]+", path) else {}
            found[f"{moment}: {path}"] = (await http.get(path, params=query)).content
    return found


def filled(path: str, known: Mapping[str, list[str]]) -> list[str]:
    names = re.findall(r"\{(\w+)\}", path)
    if not names:
        return [path]
    given = {name: known[name][0] for name in names}
    return [path.format(**given | {names[0]: one}) for one in known[names[0]]]


def read_tree(folder: Path, moment: str) -> dict[str, bytes]:
    """Return the files below a folder; those that are gone by then are left out."""
    found: dict[str, bytes] = {}
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            try:
                found[f"{moment}: {path.relative_to(folder)}"] = path.read_bytes()
            except FileNotFoundError:
                continue
    return found


def leaks(outputs: Mapping[str, bytes]) -> set[tuple[str, int]]:
    """Return each output that has a secret, with its number; a line or another spelling of one counts too."""
    return {
        (name, number)
        for name, output in outputs.items()
        for number in range(len(STAGES))
        for form in spellings(value(number))
        if form.encode() in output
    }


def spellings(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if f"{line[:3]}" != "---"]
    return [*lines, json.dumps(text)[1:-1], repr(text)[1:-1]]


COMMANDS = {
    "export.jsonl": ["runs", "export", RUN, "--output"],
    "atif.jsonl": ["runs", "export", RUN, "--atif", "--output"],
    "trace.json": ["trace", RUN, "--output"],
    "page.html": ["show", f"{RUN}.0.0", "--html"],
    "failed.html": ["show", f"{RUN}.1.0", "--html"],
    "shown": ["show", f"{RUN}.0.0"],
    "shown.json": ["show", f"{RUN}.0.0", "--json"],
    "tokens": ["show", f"{RUN}.0.0", "--color", "mask", "--no-pager"],
    "groups.json": ["runs", "groups", RUN, "--json"],
    "environments.json": ["env", "list", "--json"],
}
"""What a user takes out of a service with the commands: those with a final option write the file, the others print."""


async def run_commands(service: GatewayService, folder: Path) -> dict[str, bytes]:
    """Return what the commands write and print, of a service that listens on a port for them."""
    await anyio.Path(folder).mkdir()
    listening = uvicorn.Server(uvicorn.Config(service.app, port=0, log_level="error", lifespan="off"))
    outputs: dict[str, bytes] = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listening.serve)
        await until(lambda: listening.started, 10)
        url = f"http://127.0.0.1:{listening.servers[0].sockets[0].getsockname()[1]}"
        for name, arguments in COMMANDS.items():
            file = [str(folder / name)] if arguments[-1] in {"--output", "--html"} else []
            command = [sys.executable, "-m", "rollout_service.cli", *arguments, *file]
            environ = {**os.environ, "ROLLOUT_URL": url, "ROLLOUT_STATE_DIR": str(folder)}
            done = await anyio.run_process(command, env=environ, check=False)
            assert done.returncode == 0, (arguments, done.stderr)
            outputs[f"command: {name}, printed"] = done.stdout + done.stderr
        listening.should_exit = True
    return outputs | read_tree(folder, "command")


async def run_to_its_end(service: GatewayService, folder: Path) -> tuple[list[Rollout], dict[str, bytes]]:
    """Run three tasks, of which two fail; return them, and all that is to be seen of them meanwhile and at the end."""
    tasks = [{"environment": "secretive", "instance": {"fail": fail}} for fail in ("", *FAILURES)]
    order = {"run_id": RUN, "batch_size": 1, "group_size": 1, "source": {"kind": "inline", "tasks": tasks}}
    rollouts, outputs = [f"{RUN}.{number}.0" for number in range(len(tasks))], dict[str, bytes]()
    async with service.http(90) as http:
        (await http.post("/v1/runs", json=order)).raise_for_status()
        for moment, reached, go in (("agent", "looking", "go"), ("grader", "grading", "grade")):
            await until(anyio.Path(folder / reached).exists, 90)
            outputs |= await gather(service, moment, rollouts) | read_state(folder, moment)
            (folder / go).touch()
        ended = [await service.client.wait(name, timeout_seconds=90) for name in rollouts]
        outputs |= await gather(service, "end", rollouts)
        outputs |= await run_commands(service, folder / "taken")
        outputs["lease"] = (await http.post(f"/v1/runs/{RUN}/lease", json={})).raise_for_status().content
        rescored = await http.post(f"/v1/runs/{RUN}/rescore", json={})
        outputs["rescored"] = rescored.raise_for_status().content
    return ended, outputs


def read_state(folder: Path, moment: str) -> dict[str, bytes]:
    """Return the files of the service's state folder, and those of a backup of it."""
    state, backup = folder / "state", folder / f"backup-{moment}"
    make_backup(Places.of(Settings(state_dir=state)), backup)
    return read_tree(state, f"{moment}, state") | read_tree(backup, f"{moment}, backup")


async def test_ten_secrets_are_in_no_output(tmp_path, monkeypatch, log, spans):
    given, look = plant(tmp_path, monkeypatch), LOOK.format(folder=tmp_path)
    async with (
        engine_of(look, "echo $SECRET_0; exit 1") as engine,
        gateway_service(tmp_path / "state", [engine], **given) as service,
    ):
        ended, outputs = await run_to_its_end(service, tmp_path)
    outputs |= read_state(tmp_path, "stopped")
    outputs["log"] = log.getvalue().encode()
    outputs["spans"] = repr([(span.name, attributes(span), span.events) for span in spans.spans]).encode()
    assert leaks(outputs) == set()

    for name in ("log", "rescored", "lease", *(f"end: /v1/rollouts/{one.rollout_id}/page" for one in ended)):
        assert b"***" in outputs[name], f"nothing was masked in {name}, so it shows nothing"
    for name in ("export.jsonl", "atif.jsonl", "page.html", "failed.html", "shown.json, printed"):
        assert b"***" in outputs[f"command: {name}"], f"nothing was masked in {name}, so it shows nothing"
    assert b"secretive" in outputs["spans"]
    assert [rollout.state for rollout in ended] == ["completed", "failed", "failed"]
    for rollout, stage in zip(ended[1:], FAILURES, strict=True):
        assert (rollout.error.stage, "SECRET_" in rollout.error.message) == (stage, True)
    told = outputs[f"end: /v1/rollouts/{ended[0].rollout_id}/messages"].decode()
    assert "a process has the secrets of others\\n" not in told
    for number, stage in enumerate(STAGES):
        is_the_agents = stage == "SANDBOX"
        assert (hashlib.sha256(value(number).encode()).hexdigest() in told) is is_the_agents
        assert bool(leaks({"seen": (tmp_path / "seen").read_bytes()}) & {("seen", number)}) is is_the_agents


PROGRAM = """
import json, os, sys, urllib.request

key = os.environ["KEY"]
messages = [{"role": "system", "content": f"Use {key}."}, {"role": "user", "content": json.dumps({"with": key})}]
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(address, body, headers)).read()
print("used", key)
"""
WITH_PROGRAM = """
[harness]
name = "command"
command = ["{python}", "agent.py"]
[init]
command = "cp /environment/agent.py ."
"""
WITH_SUBAGENTS = """
[parallel.subagent]
tools = ["bash"]
"""
ONE_KEY = """
name = "secretive"
image = "base"
prompt = "Work."
sandbox.secrets.KEY = {{ variable = "HOST_0" }}
evaluate.command = "echo '{{\\"reward\\": 1}}' >$ROLLOUT_RESULT"
{more}
"""


async def finished(folder: Path, engine: ScriptedEngine, frozen: ScriptedEngine, more: str) -> Rollout:
    """Return a rollout of an environment with one secret, with all that its agents were told."""
    environment = folder / "secretive"
    environment.mkdir()
    (environment / "environment.toml").write_text(ONE_KEY.format(more=more))
    (environment / "agent.py").write_text(PROGRAM)
    given = {"environments": [environment], "secrets": {"variables": ["HOST_0"]}}
    async with engine, frozen, gateway_service(folder / "state", [engine], **given) as service:
        await service.client.add_backend(BackendSpec(url=HttpUrl(frozen.url), pool="frozen-1"))
        task, exports = {"environment": "secretive", "instance": {}}, {"nodes": "tokens"}
        order = RolloutRequest.model_validate({"rollout_id": "r", "task": task, "exports": exports})
        await service.client.submit(order)
        await service.client.wait("r", timeout_seconds=60)
        return await service.client.get("r", trajectory=True)


async def test_a_program_tells_its_model_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HOST_0", value(0))
    more = WITH_PROGRAM.format(python=sys.executable)
    rollout = await finished(tmp_path, scripted("Done."), scripted("Done."), more)
    assert (rollout.state, rollout.program and rollout.program.output) == ("completed", "used ***")
    assert [one.content for one in rollout.trajectory.messages] == ["Use ***.", '{"with": "***"}', "Done."]
    assert leaks({"rollout": rollout.model_dump_json().encode()}) == set()


async def test_sub_agents_are_told_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HOST_0", value(0))
    created = called("create_subagent", name="worker", system_prompt="Look.")
    lead = scripted(f"{created}\n{called('assign_task', agent='worker', prompt='Look.')}", "Done.")
    worker = scripted(called("bash", command="env"), "<result>done</result>")
    rollout = await finished(tmp_path, lead, worker, WITH_SUBAGENTS)
    [node] = rollout.nodes
    assert any("KEY=***" in message.content for message in node.trajectory.messages)
    assert leaks({"rollout": rollout.model_dump_json().encode()}) == set()
