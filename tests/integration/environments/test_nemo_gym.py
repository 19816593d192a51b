"""With the real library, rows get the rewards that NeMo Gym's own servers give the same answers."""

import json
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import ToolCall
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.bridges.nemo_gym.environment import NemoGym
from rollout_service.environments.bridges.nemo_gym.library import NEMO_GYM, SERVERS, WORKER
from rollout_service.environments.dataset_files import count_splits
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import Trial, play
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from tests.support.newer_python import needs_python_312

pytestmark = [pytest.mark.apptainer, pytest.mark.bridges, needs_python_312]
ALONE = """
import asyncio, importlib, json, runpy, sys
from unittest.mock import MagicMock
runpy.run_path(sys.argv[1])["import_library"]()
import httpx
from nemo_gym.server_utils import ServerClient
USAGE = {"input_tokens": 0, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 0,
         "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 0}
def response(output):
    return {"id": "r", "object": "response", "created_at": 0, "model": "m", "output": output, "usage": USAGE,
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
def message(text):
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
async def reward(case):
    module = importlib.import_module(f"resources_servers.{case['server']}.app")
    server, config = getattr(module, case["class"]), case["config"]
    kind = server.model_fields["config"].annotation
    made = server(config=kind(host="h", port=1, entrypoint="app.py", name="s", **config),
                  server_client=MagicMock(spec=ServerClient))
    transport = httpx.ASGITransport(made.setup_webserver())
    async with httpx.AsyncClient(transport=transport, base_url="http://gym") as gym:
        if case["turns"]:
            await gym.post("/reset", json=case["row"])
            steps = [await gym.post("/step", json=case["row"] | {"response": response([message(text)])})
                     for text in case["turns"]]
            return sum(step.json()["reward"] for step in steps)
        await gym.post("/seed_session", json=case["row"])
        output = []
        for number, (name, arguments) in enumerate(case["calls"]):
            said = await gym.post(f"/{name}", json=arguments)
            output += [{"type": "function_call", "name": name, "arguments": json.dumps(arguments),
                        "call_id": f"c{number}", "id": f"f{number}"},
                       {"type": "function_call_output", "call_id": f"c{number}", "output": said.text}]
        output += [message(case["text"])] if case["text"] else []
        verdict = await gym.post("/verify", json=case["row"] | {"response": response(output)})
        verdict.raise_for_status()
        return verdict.json()["reward"]
async def main():
    return [await reward(case) for case in json.loads(sys.stdin.read())]
print("REPLY", json.dumps(asyncio.run(main())))
"""


@dataclass(frozen=True)
class Played:
    """What a policy does with the first row of a server, and the class that answers it."""

    server: str
    kind: str
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    text: str = ""
    turns: tuple[str, ...] = ()
    config: tuple[tuple[str, JsonValue], ...] = ()

    @property
    def task(self) -> dict[str, JsonValue]:
        """The instance."""
        return next(one for one in NemoGym().dataset() if one["server"] == self.server)

    @property
    def row(self) -> dict[str, Any]:
        """The row, as it is in the package."""
        row: Any = self.task["row"]
        return dict(row)

    @property
    def policy(self) -> ScriptedPolicy:
        """A policy that makes the calls in its first turns, two at once, and then says the text."""
        made = [call(name, **arguments) for name, arguments in self.calls]
        pairs = [turn("", *made[at : at + 2]) for at in range(0, len(made), 2)]
        return ScriptedPolicy([*pairs, *([self.text] if self.text else []), *self.turns])

    def alone(self) -> dict[str, Any]:
        """Return what the library alone needs to know."""
        about = {"server": self.server, "class": self.kind, "row": self.row, "calls": self.calls}
        return {**about, "text": self.text, "turns": self.turns, "config": dict(self.config)}


def synonyms(count: int) -> Played:
    played = Played("example_multi_step", "ExampleMultiStepResourcesServer")
    words, values = played.row["expected_synonyms"], played.row["expected_synonym_values"]
    calls = [("get_synonym_value", {"synonym": word}) for word in words]
    last = ("extract_synonym_values", {"synonym_values": values[:count]})
    return Played(played.server, played.kind, (*calls, last), "Done.")


def cases() -> dict[str, Played]:
    mcqa = Played("mcqa", "MCQAResourcesServer")
    letter = mcqa.row["expected_answer"]
    office = Played("workplace_assistant", "WorkbenchResourcesServer")
    told = tuple((one["name"], json.loads(one["arguments"])) for one in office.row["ground_truth"])
    counter, count = "example_session_state_mgmt", "StatefulCounterResourcesServer"
    steps = (
        ("increment_counter", {"count": 1}),
        ("increment_counter", {"count": 2}),
        ("get_counter_value", {}),
    )
    xlam = Played("xlam_fc", "XlamFcResourcesServer")
    asked = tuple((one["name"], one["arguments"]) for one in xlam.row["expected_answers"])
    return {
        "steps": synonyms(99),
        "steps half done": synonyms(1),
        "state": Played(counter, count, steps, "It is 6."),
        "a choice": Played("mcqa", mcqa.kind, text=f"So it is \\boxed{{{letter}}}"),
        "office": Played(office.server, office.kind, told, "Sent."),
        "calls alone": Played(xlam.server, xlam.kind, asked),
        "turns": Played(
            "example_multi_turn_gymnasium",
            "ExampleMultiTurnEnv",
            turns=("Paris", "2 million", "The Eiffel Tower"),
        ),
    }


EXPECTED = {
    "steps": 1.0,
    "steps half done": 0.0,
    "state": 1.0,
    "a choice": 1.0,
    "office": 1.0,
    "calls alone": 1.0,
    "turns": 1.0,
}


@pytest.fixture(scope="module")
def own_rewards() -> dict[str, float]:
    """What the library alone gives each case: its servers in one process, without our worker's server or client."""
    done = subprocess.run(
        [NEMO_GYM.python(), "-sP", "-W", "ignore", "-c", ALONE, WORKER],
        input=json.dumps([case.alone() for case in cases().values()]),
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(cases(), json.loads(done.stdout.rpartition("REPLY")[2]), strict=True))


async def played(case: Played, sandboxes: SandboxSource, **changes: Any) -> Trial:
    return await play(NemoGym(), {**case.task, **changes}, case.policy, sandboxes)


@pytest.mark.parametrize("name", EXPECTED)
async def test_the_reward_is_the_servers_own(name, own_rewards, sandboxes):
    case = cases()[name]
    trial = await played(case, sandboxes)
    assert trial.score.reward == own_rewards[name] == EXPECTED[name]
    last = StopReason.ANSWERED if case.text else StopReason.FINISHED
    assert trial.stop_reason is last
    offered = [tool["function"]["name"] for tool in trial.episode.policy.tools]  # type: ignore[attr-defined]
    assert offered == [tool["name"] for tool in case.row["responses_create_params"].get("tools", [])]


async def test_a_tools_answer_is_what_the_server_says_and_only_tools_can_be_called(sandboxes):
    case = cases()["state"]
    malformed = ToolCall(id="call", name=None, arguments=None, raw="{", error="invalid_json")
    policy = ScriptedPolicy(
        [
            turn("", call("increment_counter", count="many"), call("verify", reward=1)),
            turn("", call("increment_counter", count=3), call("get_counter_value"), malformed),
            "It is 6.",
        ]
    )
    trial = await play(NemoGym(), case.task, policy, sandboxes)
    wrong, forbidden, right, state, unread = [one.content for one in policy.messages if one.role == "tool"]
    assert "int_parsing" in wrong
    assert "There is no tool 'verify'" in forbidden
    assert [json.loads(right), json.loads(state)] == [{"success": True}, {"count": 6}]
    assert "malformed" in unread
    assert trial.score.reward == 1.0


async def test_a_verification_that_needs_a_judge_is_a_failure(sandboxes):
    case = Played("math_with_judge", "LibraryJudgeMathResourcesServer", text="It is \\boxed{31}")
    with pytest.raises(EnvironmentFailedError, match="needs another server"):
        await played(case, sandboxes, config={"should_use_judge": True})


async def test_a_row_that_its_server_cannot_verify_is_a_failure(sandboxes):
    case = cases()["a choice"]
    row = {name: value for name, value in case.row.items() if name != "options"} | {"options": "none"}
    with pytest.raises(EnvironmentFailedError, match="/verify answered 422"):
        await played(case, sandboxes, row=row)


async def test_a_row_with_a_tool_that_its_server_lacks_is_a_failure(sandboxes):
    case = cases()["state"]
    parameters = case.row["responses_create_params"]
    tools = [*parameters["tools"], {"type": "function", "name": "fly"}]
    row = case.row | {"responses_create_params": parameters | {"tools": tools}}
    with pytest.raises(EnvironmentFailedError, match="does not answer the tool 'fly'"):
        await played(case, sandboxes, row=row)


async def test_a_server_whose_packages_are_missing_says_which(sandboxes):
    case = cases()["a choice"]
    with pytest.raises(EnvironmentFailedError, match="No module named 'reasoning_gym'"):
        await played(case, sandboxes, server="reasoning_gym")


def test_the_data_set_has_rows_of_all_servers_in_both_splits():
    environment = NemoGym()
    instances = environment.dataset()
    for instance in instances:
        environment.check(instance)
    assert {instance["server"] for instance in instances} == set(SERVERS)
    assert set(count_splits(instances)) == {"train", "held_out"}


def test_a_server_that_does_not_exist_is_refused_with_the_nearest():
    with pytest.raises(InvalidFieldError) as caught:
        NemoGym().check({**cases()["a choice"].task, "server": "mcq"})
    (field,) = caught.value.fields
    assert field.path == "instance.server"
    assert "did you mean mcqa" in field.message
