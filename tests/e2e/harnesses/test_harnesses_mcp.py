"""Real programs are agents with the tools of an environment's MCP server, which they start in their sandboxes."""

import json
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest

from api_schemas.rollouts import Rollout, RolloutRequest, StopReason
from api_schemas.tasks import Task
from rollout_service.settings import PipelineSettings, SandboxesSettings
from rollout_service.testing import ScriptedEngine
from rollout_service.tokens import ChatRenderer, check_invariants
from sandboxes import ApptainerConfig
from sandboxes.config import PressureConfig
from tests.support.gateway.jobs import CONTEXT, END, IMAGE, VOCABULARY, Job, JobsScript, write_model
from tests.support.gateway.service import gateway_service
from tests.support.samples import sampled_by_turn

TOOLS = {
    "codex": "mcp__notes__add",
    "claude_code": "mcp__notes__add",
    "qwen_code": "mcp__notes__add",
    "opencode": "notes_add",
    "gemini_cli": "mcp_notes_add",
}
"""The name under which each program offers the server's tool."""
SERVER = """
import json, os, sys

TOOL = {"name": "add", "description": "Add two numbers.", "inputSchema": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}}

def result(method, params):
    match method:
        case "initialize":
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                    "serverInfo": {"name": "notes", "version": "1"}}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            given = params["arguments"]
            text = f"{os.environ['WORD']} {given['a'] + given['b']}"
            open("/workspace/said", "w").write(text)
            return {"content": [{"type": "text", "text": text}]}
    return {}

for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        said = {"jsonrpc": "2.0", "id": asked["id"], "result": result(asked["method"], asked.get("params") or {})}
        print(json.dumps(said), flush=True)
"""
WORD = 'for 5$ the "sum" is'
ENVIRONMENT = """
name = "{harness}"
harness = "{harness}"
image = "{image}"
prompt = "Work on the job {{{{ instance.job }}}}."
[limits]
agent_seconds = 240
[sandbox]
memory = "3G"
[init]
command = "cp /environment/server.py /workspace/"
files = ["server.py"]
[[mcp]]
name = "notes"
command = ["python3", "/workspace/server.py"]
env = {{ WORD = '{word}' }}
[evaluate]
command = "python3 /environment/grade.py"
"""
GRADER = """
import json, os, pathlib

said = pathlib.Path("/workspace/said")
reward = float(said.exists() and said.read_text() == 'for 5$ the "sum" is 42')
pathlib.Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps({"reward": reward}))
"""

pytestmark = [
    pytest.mark.apptainer,
    pytest.mark.harnesses,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("harnesses"),
]


@dataclass(frozen=True, slots=True)
class ToolJob(Job):
    """A job whose only step is a call of the server's tool."""

    def answer(self, number: int) -> str:
        """Return the call, or the end."""
        call = {"name": TOOLS[self.harness], "arguments": {"a": 20, "b": 22}}
        written = f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" if number == 0 else ""
        return f"<think>\nOn.\n</think>\n\n{self.said(number)}{written}{END}"


JOBS = [ToolJob(harness, "adds", 1) for harness in TOOLS]


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rollout]:
    """Let every program work on its job; return the rollouts by harness."""
    return anyio.run(run_all, tmp_path_factory.mktemp("mcp"))


async def run_all(folder: Path) -> dict[str, Rollout]:
    model = write_model(folder / "model")
    script = JobsScript(ChatRenderer.load(model), JOBS)
    settings = {
        "sandbox": ApptainerConfig(),
        "environments": [write_environment(folder / harness, harness) for harness in TOOLS],
        "sandboxes": SandboxesSettings(pressure=PressureConfig(enabled=False)),
        "pipeline": PipelineSettings(max_attempts=1),
    }
    async with (
        ScriptedEngine(script, model_path=model, vocab_size=VOCABULARY, context_length=CONTEXT) as engine,
        gateway_service(folder / "state", [engine], **settings) as service,
    ):
        for job in JOBS:
            task = Task(environment=job.harness, instance={"job": job.name})
            await service.client.submit(RolloutRequest(rollout_id=job.harness, task=task))
        return {harness: await service.client.wait(harness) for harness in TOOLS}


def write_environment(folder: Path, harness: str) -> Path:
    folder.mkdir()
    (folder / "environment.toml").write_text(ENVIRONMENT.format(harness=harness, image=IMAGE, word=WORD))
    (folder / "server.py").write_text(SERVER)
    (folder / "grade.py").write_text(GRADER)
    return folder


@pytest.mark.parametrize("harness", TOOLS)
def test_a_program_calls_the_tool_of_the_server(rollouts, harness):
    rollout = rollouts[harness]
    assert rollout.program is not None, rollout.error
    assert rollout.reward == 1.0, (rollout.error, rollout.program.output[-4_000:])
    assert rollout.stop_reason is StopReason.FINISHED
    trajectory = rollout.trajectory
    check_invariants(trajectory)
    assert len(sampled_by_turn(trajectory)) == 2
    assert any("is 42" in message.content for message in trajectory.messages if message.role == "tool")
