"""In real sandboxes, no process or file that the agent leaves meets a secret of the grader or of the init command."""

import json
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.environments.secrets import HostSecrets
from rollout_service.episodes import PolicyTurn
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import play
from rollout_service.settings.pipeline import SecretsSettings
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn

pytestmark = pytest.mark.apptainer
HOST = {"GRADER_KEY": "grader-47e1", "INIT_KEY": "init-93b2", "AGENT_KEY": "agent-5c0d"}
TABLE = """
name = "e"
image = "base"
prompt = "Do it."
tools = ["bash", "python", "finish"]
sandbox.secrets.FOR_ALL = { variable = "AGENT_KEY" }
[init]
command = "bash /environment/init"
secrets = { FOR_INIT = { variable = "INIT_KEY" } }
[evaluate]
command = "bash /environment/evaluate"
secrets = { FOR_GRADER = { variable = "GRADER_KEY" } }
run = { command = "bash program" }
"""
INIT = """
[ "$FOR_INIT" = init-93b2 ] || exit 3
nohup setsid sleep 600 >/dev/null 2>&1 &
"""
SEARCH = """
in_files() { grep -rlE '[i]nit-93b2|[g]rader-47e1' /tmp /var/tmp /root /workspace /run /dev/shm /etc 2>/dev/null; }
in_processes() { grep -lE '[i]nit-93b2|[g]rader-47e1' /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null; }
found() { echo "files=$(in_files | wc -l) processes=$(in_processes | wc -l) all=${#FOR_ALL} grader=$FOR_GRADER"; }
"""
PROGRAM = """
. /workspace/search
nohup setsid bash /workspace/lurk >/dev/null 2>&1 &
found
"""
"""The agent's program, which also leaves a process that goes on to search."""
LURK = """
. /workspace/search
while :; do found; cp -r /tmp/.rollout-* /workspace/; sleep 0.01; done >>/workspace/stolen 2>/dev/null
"""
LEAVE = f"""
cat >search <<'END'
{SEARCH}
END
cat >lurk <<'END'
{LURK}
END
cat >program <<'END'
{PROGRAM}
END
bash program
for file in ~/.bashrc ~/.profile sitecustomize.py conftest.py; do echo 'env >/workspace/stolen' >$file; done
ln -s /proc/self/environ environ; mkfifo secrets.sh; export BASH_ENV=/workspace/search
"""
EVALUATE = """
[ "$FOR_GRADER" = grader-47e1 ] && [ "$FOR_ALL" = agent-5c0d ] && [ -z "$FOR_INIT" ] || exit 3
sleep 1
. "$ROLLOUT_ENVIRONMENT/search"
others=0
for one in $(in_processes); do  # forks of this shell have ended by now
  [ -e $one ] && [ $one != /proc/$$/environ ] && others=$((others + 1))
done
own=$(in_processes | grep -cx /proc/$$/environ)
stolen=$(grep -c 'processes=[1-9]\\|files=[1-9]\\|grader=.' /workspace/stolen)
ran=$(grep -c 'files=0 processes=0 all=10 grader=.n' "$ROLLOUT_RUNS")
echo "{\\"reward\\": 1, \\"parts\\": {\\"own\\": $own, \\"others\\": $others, \\"stolen\\": ${stolen:-0},
  \\"ran\\": $ran,
  \\"files\\": $(in_files | grep -v /environment/ | wc -l)}}" >"$ROLLOUT_RESULT"
"""


async def test_the_graders_secret_meets_nothing_of_the_agent(tmp_path, provider):
    folder = tmp_path / "e"
    await anyio.Path(folder).mkdir()
    for name, text in {
        "environment.toml": TABLE,
        "init": INIT,
        "evaluate": EVALUATE,
        "search": SEARCH,
    }.items():
        await anyio.Path(folder / name).write_text(text)
    seen_on_the_host: list[bytes] = []

    def look_on_the_host(messages: Sequence[Message]) -> PolicyTurn:
        """Keep the command lines of all processes, which any user of the host can read."""
        seen_on_the_host.extend(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
        return turn(
            "",
            call("python", code="import os\nprint(len(os.environ['FOR_ALL']), os.environ.get('FOR_INIT'))"),
        )

    policy = ScriptedPolicy(
        [turn("", call("bash", command=LEAVE)), look_on_the_host, turn("", call("finish", answer="x"))]
    )
    source = SandboxSource(provider, secrets=HostSecrets(SecretsSettings(variables=list(HOST)), HOST))
    played = await play(load_folder(folder), {}, policy, source)
    assert provider.live() == []

    told = [message.content for message in policy.messages if message.role == "tool"]
    assert [told[0].strip(), told[1].strip()] == ["files=0 processes=0 all=10 grader=", "10 None"]
    assert played.stop_reason is StopReason.FINISHED
    assert played.score.parts == {"own": 1, "others": 0, "stolen": 0, "ran": 1, "files": 0}
    assert not [line for line in seen_on_the_host if any(value.encode() in line for value in HOST.values())]
    assert not any(value in json.dumps(told) for value in HOST.values())
