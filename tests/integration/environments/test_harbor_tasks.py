"""Tasks in Harbor's format: their solutions get 1, nothing gets 0, and nobody forges a reward."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import Result
from typer.testing import CliRunner

from api_schemas.rollouts import StopReason
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.cli import app
from rollout_service.environments.contract import Environment
from rollout_service.environments.harbor.collection import load_harbor
from rollout_service.environments.harbor.verifier import (
    HealthcheckFailedError,
    RewardEmptyError,
    RewardInvalidError,
    RewardMissingError,
    TestsNeverRanError,
    VerifierTimeoutError,
)
from rollout_service.environments.wrapped import Solving
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import Trial, play
from rollout_service.settings.pipeline import HarborSettings
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from sandboxes import ApptainerConfig, make_provider
from sandboxes.images.build import ApptainerBuilder
from sandboxes.images.dockerfiles import build_many, dockerfile_at
from sandboxes.images.store import ImageStore
from tests.support.harbor.attacks import ATTACKS

pytestmark = [pytest.mark.apptainer, pytest.mark.timeout(600), pytest.mark.slow(seconds=200)]
EXAMPLES = Path(__file__).parents[3] / "examples" / "harbor"
TASKS = ("counter-service", "ledger", "word-count")
BASE = {"base": str(ImageStore().root / "base.sif")}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Build the images of the examples, once."""
    place = tmp_path_factory.mktemp("harbor")
    store = ImageStore(place / "images", ApptainerBuilder(place / "layers"))
    dockerfiles = load_harbor(EXAMPLES, HarborSettings()).dockerfiles()
    sources = {name: dockerfile_at(path) for name, path in dockerfiles.items()}

    async def build() -> None:
        for outcome in await build_many(store, sources, given=BASE):
            assert outcome.error is None, outcome.error

    anyio.run(build)
    yield store.root
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
async def sandboxes(images: Path, tmp_path: Path) -> AsyncIterator[SandboxSource]:
    provider = make_provider(ApptainerConfig(), tmp_path / "state", images)
    yield SandboxSource(provider)
    assert provider.live() == []
    await provider.close()


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Return a copy of the examples, to be changed."""
    return Path(shutil.copytree(EXAMPLES, tmp_path / "tasks"))


def task(name: str, folder: Path = EXAMPLES, **settings: Any) -> Environment:
    return load_harbor(folder, HarborSettings(**settings)).for_instance({"task": name})


async def solve(environment: Environment, sandboxes: SandboxSource) -> Trial:
    return await play(Solving(environment), {}, ScriptedPolicy([]), sandboxes)


async def act(environment: Environment, sandboxes: SandboxSource, *commands: str) -> Trial:
    """Let an agent run a command in each step, and stop."""
    script = [one for command in commands for one in (turn("", call("bash", command=command)), turn("I am done."))]
    return await play(environment, {}, ScriptedPolicy(script), sandboxes)


@pytest.mark.parametrize("name", TASKS)
async def test_a_solution_gets_one_and_nothing_gets_zero(name, sandboxes):
    solved = await solve(task(name), sandboxes)
    assert (solved.score.reward, solved.stop_reason, solved.episode.notes) == (1.0, StopReason.FINISHED, [])
    idle = await play(task(name), {}, ScriptedPolicy(["No.", "No."]), sandboxes)
    assert (idle.score.reward, idle.stop_reason) == (0.0, StopReason.ANSWERED)


async def test_steps_follow_in_one_conversation(sandboxes):
    script = [
        turn("", call("bash", command="printf 'rent 700\\nfood 250\\n' >ledger.txt")),
        turn("", call("finish", answer="entered")),
        turn("", call("bash", command="ls; cat more.txt >>ledger.txt; echo 1000 >sum.txt")),
        turn("", call("finish", answer="reported")),
    ]
    policy = ScriptedPolicy(script)
    trial = await play(task("ledger"), {}, policy, sandboxes)
    assert trial.score.parts == {"reward": 1.0, "enter.reward": 1.0, "report.reward": 1.0}
    assert [message.role for message in policy.messages] == [
        *("user", "assistant", "tool", "assistant"),
        *("tool", "user", "assistant", "tool", "assistant"),
    ]
    assert policy.messages[4].content == "This step has ended."
    assert policy.messages[7].content.split() == ["ledger.txt", "more.txt"]  # the setup has removed itself
    assert trial.episode.answer == "reported"


@pytest.mark.parametrize(
    ("commands", "reward", "parts"),
    [
        # A gate that is missed ends the task, whatever the agent did later.
        (
            ["true", "printf 'rent 700\\nfood 250\\n' >ledger.txt; echo 1000 >sum.txt"],
            0.0,
            {"enter.reward": 0.0},
        ),
        (
            ["printf 'rent 700\\nfood 250\\n' >ledger.txt", "true"],
            0.5,
            {"enter.reward": 1.0, "report.reward": 0.0},
        ),
        # Each step is graded by what the agent had left at its end.
        (["printf 'rent 700\\nfood 250\\n' >ledger.txt", "rm ledger.txt; echo 1000 >sum.txt"], 1.0, {}),
    ],
    ids=["gate", "half", "moments"],
)
async def test_steps_are_graded_apart(commands, reward, parts, sandboxes):
    trial = await act(task("ledger"), sandboxes, *commands)
    assert trial.score.reward == reward
    assert trial.score.parts.items() >= parts.items()


@pytest.mark.parametrize(
    "name",
    [
        "counter-service",
        *(pytest.param(name, marks=pytest.mark.extended("sandboxes/")) for name in ("ledger", "word-count")),
    ],
)
async def test_a_hostile_agent_gets_nothing(name, sandboxes):
    rewards: dict[str, float | None] = {}

    async def attack(attack: str, command: str) -> None:
        async with limiter:
            try:
                trial = await act(task(name), sandboxes, command, command)
                rewards[attack] = trial.score.reward
            except EnvironmentFailedError as error:
                rewards[attack] = None
                failures.append(f"{attack}: {error}")

    limiter, failures = anyio.CapacityLimiter(3), list[str]()
    async with anyio.create_task_group() as group:
        for each, command in ATTACKS.items():
            group.start_soon(attack, each, command)
    assert rewards == dict.fromkeys(ATTACKS, 0.0), failures


def test_the_commands_build_the_images_and_tell_good_tasks(images, tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLLOUT_IMAGES_DIR", str(images))
    monkeypatch.setenv("ROLLOUT_LAYERS_DIR", str(images.parent / "layers"))
    shutil.rmtree(tasks / "counter-service")
    (tasks / "ledger/steps/report/solution/solve.sh").write_text("#!/bin/bash\necho 999 >/app/sum.txt\n")

    def invoke(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["env", *arguments])

    built = invoke("build", str(tasks), "--base", f"base={BASE['base']}", "--json")
    assert built.exit_code == 0
    assert sorted(one["name"] for one in json.loads(built.stdout)) == sorted(
        load_harbor(tasks, HarborSettings()).dockerfiles()
    )
    good = tmp_path / "good.jsonl"
    checked = invoke("check", str(tasks), "--run", "--good", str(good), "--json")
    assert checked.exit_code == 1
    report = json.loads(checked.stdout)
    assert report["findings"] == ['{"task": "ledger"}: its solution gets 0.5']
    assert [(one["solved"], one["idle"]) for one in report["tried"]] == [(0.5, 0.0), (1.0, 0.0)]
    assert good.read_text() == '{"task": "word-count"}\n'
    (tasks / "ledger/environment/Dockerfile").write_text("FROM base\nRUN mkdir -p /app /new\n")
    missing = invoke("check", str(tasks))
    assert missing.exit_code == 1
    assert "build it with `rollout-service env build`" in missing.stdout


def test_the_images_of_a_data_set_are_prepared_and_an_interruption_loses_none(images, tasks, tmp_path):
    """Of four tasks, one has its image, one is quick, one is interrupted, and one cannot be built."""
    shutil.rmtree(tasks / "counter-service")
    for name, step in (
        ("quick", "RUN true"),
        ("slow", "RUN touch /begun && sleep 600"),
        ("wrong", "RUN false"),
    ):
        shutil.copytree(tasks / "word-count", tasks / f"z-{name}")
        (tasks / f"z-{name}/environment/Dockerfile").write_text(f"FROM base\nWORKDIR /app\n{step}\n")
    shutil.rmtree(tasks / "ledger")
    shutil.move(tasks / "z-wrong", tmp_path / "wrong")
    environ = {
        **os.environ,
        "ROLLOUT_IMAGES_DIR": str(images),
        "ROLLOUT_LAYERS_DIR": str(images.parent / "layers"),
    }
    command = [sys.executable, "-m", "rollout_service.cli", "env", "prepare", str(tasks), "--jobs", "1"]
    command += ["--base", f"base={BASE['base']}"]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as interrupted:
        assert "harbor-z-quick-" in next(line for line in interrupted.stderr if line.startswith("harbor-"))
        interrupted.send_signal(signal.SIGINT)
        try:
            interrupted.communicate(timeout=120)
        finally:
            interrupted.kill()
    assert interrupted.returncode != 0
    (tasks / "z-slow/environment/Dockerfile").write_text("FROM base\nRUN mkdir /app\n")
    shutil.move(tmp_path / "wrong", tasks / "z-wrong")
    again = subprocess.run([*command, "--json"], env=environ, capture_output=True, text=True, check=False)
    said = json.loads(again.stdout)
    (failure,) = said.pop("failures")
    assert (again.returncode, said) == (1, {"instances": 4, "images": 4, "present": 2, "made": 1})
    assert failure["instance"] == '{"task": "z-wrong"}'
    assert failure["image"].startswith("harbor-z-wrong-")
    assert "RUN false" in failure["error"]


async def test_a_solution_that_leaves_daemons_still_counts(tasks, sandboxes):
    solution = tasks / "word-count/solution/solve.sh"
    solution.write_text(solution.read_text() + "setsid sleep 1000 >/dev/null 2>&1 &\n")
    assert (await solve(task("word-count", tasks), sandboxes)).score.reward == 1.0


SAME = {"shared_verifier": "same"}
SERVES = """cd /app
python3 -m http.server 8765 &
until (: </dev/tcp/127.0.0.1/8765) 2>/dev/null; do sleep 0.1; done
"""
CALLS = """#!/bin/bash
python3 -c 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:8765/texts/a.txt", timeout=5)' && r=1
echo ${r-0} >/logs/verifier/reward.txt
"""


@pytest.mark.extended("rollout_service/environments/harbor/", "rollout_service/pipeline/", "sandboxes/providers/")
@pytest.mark.parametrize(
    "settings", [SAME, SAME | {"agent_processes": "end"}, {}], ids=["as in Harbor", "ended", "fresh"]
)
async def test_a_verifier_calls_the_server_that_the_agent_left(settings, tasks, sandboxes):
    (tasks / "word-count/tests/test.sh").write_text(CALLS)
    (tasks / "word-count/solution/solve.sh").write_text(f"#!/bin/bash\n{SERVES}")
    environment = task("word-count", tasks, **settings)
    ended = {"processes of the agent or of init were ended before the grading: python3 -m http.server 8765"}
    for trial in await act(environment, sandboxes, SERVES), await solve(environment, sandboxes):
        notes = {note.partition(";")[0] for note in trial.episode.notes}
        assert (trial.score.reward, notes) == ((1.0, set()) if settings == SAME else (0.0, ended))


WEB = """
import os, urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

class Web(BaseHTTPRequestHandler):
    def do_GET(self):
        with urllib.request.urlopen(os.environ["STOCK"]) as answer:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.read())

HTTPServer(("", 8000), Web).serve_forever()
"""
ASK = "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://web:8000\").read().decode())'"
SHOP: dict[str, Any] = {
    "web": {
        "command": ["python3", "-c", WEB],
        "environment": {"STOCK": "http://db:8001/shop/stock.txt"},
        "depends_on": {
            "db": {"condition": "service_healthy"},
            "migrate": {"condition": "service_completed_successfully"},
        },
        "healthcheck": {"test": ASK, "interval": "1s"},
        "ports": ["80:8000"],
    },
    "migrate": {
        "command": 'sh -c "sleep 0.3; mkdir -p shop && echo $$STOCK >shop/stock.txt"',
        "environment": ["STOCK=17"],
        "working_dir": "/data",
        "depends_on": ["db"],
    },
    "db": {
        "command": "python3 -m http.server 8001 --directory /data",
        "volumes": ["data:/data"],
        "healthcheck": {"test": ["CMD", "bash", "-c", ": </dev/tcp/db/8001"], "interval": "1s"},
    },
}
"""The services of a task, of which one calls another."""


@pytest.fixture
def shop(tasks: Path) -> Path:
    """Return a task whose agent and tests call the web server."""
    folder, image = tasks / "word-count", task("word-count").spec.image
    (folder / "environment/docker-compose.yaml").write_text(json.dumps({"services": SHOP}))
    (folder / "environment/Dockerfile").unlink()
    toml = folder / "task.toml"
    toml.write_text(toml.read_text().replace("[environment]", f'[environment]\ndocker_image = "{image}"'))
    (folder / "tests/test.sh").write_text(
        f"#!/bin/bash\n[ $({ASK}) = 16 ] && r=1\necho ${{r-0}} >/logs/verifier/reward.txt\n"
    )
    return folder


@pytest.mark.extended("rollout_service/environments/harbor/", "sandboxes/providers/")
async def test_services_of_a_compose_file_are_reached_by_their_names(shop, tasks, sandboxes):
    sell = f"echo $(($({ASK}) - 1)) >/data/shop/stock.txt"
    trial = await act(task("word-count", tasks, **SAME), sandboxes, sell)
    assert (trial.score.reward, trial.episode.notes) == (1.0, []), trial.episode.policy.messages
    ended = await act(task("word-count", tasks, **SAME, agent_processes="end"), sandboxes, sell)
    assert ended.score.reward == 0.0
    assert "python3 -m http.server 8001" in ended.episode.notes[0]


@pytest.mark.extended("rollout_service/environments/harbor/")
@pytest.mark.parametrize(
    ("was", "broken", "said"),
    [
        (
            "http.server 8001",
            "http.server x",
            "'db': the health check failed 1 times.*invalid int value: 'x'",
        ),
        ("sleep 0.3;", "echo no table; exit 3;", "'migrate' failed; it printed: no table"),
    ],
)
async def test_a_service_that_fails_is_a_failure_with_its_name_and_output(was, broken, said, shop, tasks, sandboxes):
    compose = shop / "environment/docker-compose.yaml"
    compose.write_text(compose.read_text().replace(was, broken))
    with pytest.raises(HealthcheckFailedError, match=f"(?s)the service {said}"):
        await act(task("word-count", tasks), sandboxes, "true")


TEST = "echo 1 >/logs/verifier/reward.txt\n"
FETCHES_ITS_TOOLS = """
curl -LsSf https://astral.sh/uv/install.sh | sh
source $HOME/.local/bin/env
uvx -w pytest pytest --ctrf /logs/verifier/ctrf.json /tests/test_count.py
if [ $? -eq 0 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
"""
"""What most tasks of Terminal-Bench do. Without a network it writes 0, whatever the agent did."""


@pytest.mark.parametrize(
    ("script", "error", "said"),
    [
        ("true", RewardMissingError, "no reward.json and no reward.txt"),
        (": reward.txt; echo oh no", RewardMissingError, "no reward.txt; it printed: oh no"),
        (">/logs/verifier/reward.txt", RewardEmptyError, "reward.txt is empty"),
        ("echo nan >/logs/verifier/reward.txt", RewardInvalidError, "not a number of up to"),
        ("echo '{\"a\": true}' >/logs/verifier/reward.json", RewardInvalidError, "a: "),
        (f"{TEST}no-such-program", TestsNeverRanError, "a program is missing"),
        (f"no-such-program\n{TEST}", TestsNeverRanError, "did not find 'no-such-program'"),
        (f"# /logs/verifier/ctrf.json\n{TEST}", TestsNeverRanError, "left no ctrf.json"),
        (f"echo '{{}}' >/logs/verifier/ctrf.json\n{TEST}", TestsNeverRanError, "names no test"),
        pytest.param(FETCHES_ITS_TOOLS, TestsNeverRanError, "did not find", id="fetches its tools"),
        (f"{TEST}sleep 100", VerifierTimeoutError, "within 2 s"),
    ],
)
async def test_a_verifier_that_fails_gives_no_reward(script, error, said, tasks, sandboxes):
    if error is VerifierTimeoutError:
        toml = tasks / "word-count/task.toml"
        toml.write_text(toml.read_text().replace("timeout_sec = 60", "timeout_sec = 2"))
    (tasks / "word-count/tests/test.sh").write_text(f"#!/bin/bash\n{script}\n")
    with pytest.raises(error, match=said):
        await act(task("word-count", tasks), sandboxes, "true")


FORGED = b64encode(
    b"/tests/test.sh: line 2: uvx: command not found\n/tests/test.sh: line 1: bash: command not found\n"
).decode()
"""The one is not named by the script, and the other is there."""


@pytest.mark.parametrize(
    "script",
    [
        "/app/count.sh >/tmp/count || true",
        "[ -e /app/count.sh ] || exec /app/count.sh",
        f"echo {FORGED} | base64 -d",
    ],
    ids=["the agent's program is missing", "and it is the last", "a program prints such lines"],
)
async def test_what_is_missing_by_the_agents_doing_is_graded(script, tasks, sandboxes):
    zero = "echo 0 >/logs/verifier/reward.txt"
    (tasks / "word-count/tests/test.sh").write_text(f"#!/bin/bash\n{zero}\n{script}\n")
    trial = await act(task("word-count", tasks), sandboxes, "true")
    assert trial.score.reward == 0.0


async def test_an_agent_that_runs_out_of_time_is_graded(tasks, sandboxes):
    toml = tasks / "word-count" / "task.toml"
    toml.write_text(toml.read_text().replace("[agent]\ntimeout_sec = 120", "[agent]\ntimeout_sec = 5"))
    work = "cat /app/texts/*.txt | wc -w >/app/count.txt; sleep 600"
    trial = await act(task("word-count", tasks), sandboxes, work)
    assert (trial.stop_reason, trial.score.reward) == (StopReason.AGENT_TIMEOUT, 1.0)


async def test_the_task_s_variables_and_folders(tasks, sandboxes):
    toml = tasks / "word-count/task.toml"
    text = toml.read_text().replace("timeout_sec = 60\n", 'timeout_sec = 60\n\n[verifier.env]\nONLY = "tests"\n')
    toml.write_text(text)
    (tasks / "word-count/tests/test.sh").write_text(
        "#!/bin/bash\n"
        '[ "$PWD:$GREETING:$ONLY:$(cat count.txt)" = /app:hello:tests:/app:hello:: ] && r=1 || r=0\n'
        'echo "{\\"a\\": $r, \\"b\\": 0}" >/logs/verifier/reward.json\n'
    )
    trial = await act(task("word-count", tasks), sandboxes, 'echo "$PWD:$GREETING:$ONLY:" >count.txt; ls /tests')
    assert trial.score == dataclasses.replace(trial.score, reward=0.5, parts={"a": 1.0, "b": 0.0})


async def test_what_the_agent_removed_is_not_there_for_the_verifier(tasks, sandboxes):
    (tasks / "word-count/tests/test.sh").write_text(
        "#!/bin/bash\n[ -e texts/b.txt ] && [ ! -e texts/a.txt ] && r=1 || r=0\necho $r >/logs/verifier/reward.txt\n"
    )
    assert (await act(task("word-count", tasks), sandboxes, "rm texts/a.txt")).score.reward == 1.0


async def test_a_sandbox_that_is_not_healthy_is_a_failure(tasks, sandboxes):
    toml = tasks / "word-count/task.toml"
    check = 'command = "test -s /app/texts/a.txt"'
    broken = 'command = "echo not yet; false"\nretries = 2\ninterval_sec = 0'
    toml.write_text(toml.read_text().replace(check, broken))
    with pytest.raises(HealthcheckFailedError, match=r"failed 2 times: .* not yet"):
        await act(task("word-count", tasks), sandboxes, "true")


async def test_a_separate_verifier_sees_the_artifacts_alone(tasks, sandboxes):
    toml = tasks / "word-count/task.toml"
    text = toml.read_text().replace("[verifier]", '[verifier]\nenvironment_mode = "separate"', 1)
    text = text.replace(
        "[environment]", '[[verifier.collect]]\ncommand = "cp count.txt /logs/artifacts/"\n\n[environment]'
    )
    toml.write_text(f'artifacts = ["/app/kept"]\n{text}')
    (tasks / "word-count/tests/test.sh").write_text(
        "#!/bin/bash\n[ ! -e /app/count.txt ] && [ -s /logs/artifacts/count.txt ] && [ -e /app/kept/x ] && r=1 || r=0\n"
        "echo $r >/logs/verifier/reward.txt\n"
    )
    trial = await act(task("word-count", tasks), sandboxes, "mkdir kept; echo 5 | tee count.txt >kept/x")
    assert trial.score.reward == 1.0


async def test_a_shared_verifier_in_the_agents_own_sandbox(sandboxes):
    shared = task("counter-service", **SAME, agent_processes="end")
    assert shared.spec.evaluate_in == "same"
    assert (await solve(shared, sandboxes)).score.reward == 1.0
    assert (await act(shared, sandboxes, ATTACKS["leaves a daemon that rewrites the reward"])).score.reward == 0.0
