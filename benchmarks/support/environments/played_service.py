"""A service with real sandboxes in Apptainer, and an engine in this process that plays a script for each task.

A task's prompt has a mark, `[play NAME]`, in it. The engine answers with the commands of that name, one a turn, and
then with a text, which ends the agent.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Limits, Task
from rollout_client.client import RolloutClient
from rollout_service.cli.server_child import running_child
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing.script import Replies, Reply
from rollout_service.testing.sglang_engine import ScriptedEngine

MODEL = policy_folder("calc-tuned")
MARK = re.compile(r"\[play ([\w.-]+)\]")
PROBE = ""
"""The script of a prompt without a mark, with which the service asks whether the engine works."""
CLOCK = "echo $EPOCHREALTIME"
"""A command that needs no program, so what it prints is the moment at which it ran."""
LIMITS = Limits(max_turns=8, max_tokens=100_000, max_turn_tokens=30_000)


class PlayedTasks:
    """A script for each mark; implements `testing.script.Script`."""

    def __init__(self, commands: Mapping[str, Sequence[str]]) -> None:
        self._tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._replies = {
            name: Replies.from_texts([*map(_call, told), "I am done.<|im_end|>"], MODEL)
            for name, told in {PROBE: (), **commands}.items()
        }

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        """Return the next turn of the conversation's script."""
        found = MARK.search(self._tokenizer.decode(list(input_ids), skip_special_tokens=False))
        return self._replies[found[1] if found else PROBE].reply(input_ids, budget)


def _call(command: str) -> str:
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


@dataclass(frozen=True, slots=True)
class PlayedService:
    """A running service whose agents play scripts."""

    client: RolloutClient

    async def run(self, *requests: RolloutRequest) -> list[Rollout]:
        """Run rollouts at once, and return them as they end."""
        return [one async for one in self.client.run_all(requests, concurrency=len(requests))]


@asynccontextmanager
async def played_service(
    state: Path, environments: Iterable[Path], commands: Mapping[str, Sequence[str]], *, at_once: int
) -> AsyncIterator[PlayedService]:
    """Run a service with room for so many rollouts in each stage."""
    config = state / "rollout.toml"
    config.write_text(
        f"[pipeline]\ninit_workers = {at_once}\nrollout_workers = {at_once}\nevaluate_workers = {at_once}\n"
        "max_attempts = 1\n"  # a second attempt would be measured as a slow first one
        "[sandboxes.pressure]\nenabled = false\n"  # the load is intended, and must not throttle starts
        "[sandboxes.warm]\nsize = 0\n"  # starts are measured
        '[harbor]\nshared_verifier = "same"\n'
    )
    async with ScriptedEngine(PlayedTasks(commands), model_path=MODEL) as engine:
        flags = ["--config", str(config), "--engine", "none", "--backend", engine.url]
        flags += ["--log-level", "warning"]
        for folder in environments:
            flags += ["--environment", str(folder)]
        async with running_child(state, flags) as server:
            yield PlayedService(server.client)


def request(environment: str, **instance: object) -> RolloutRequest:
    return RolloutRequest(
        task=Task(environment=environment, instance=dict(instance)),  # type: ignore[arg-type]
        limits=LIMITS,
    )


def require_reward(rollout: Rollout, reward: float = 1.0) -> Rollout:
    """Return the rollout, and refuse to report figures of one that did not go as planned."""
    if rollout.state is not RolloutState.COMPLETED or rollout.reward != reward:
        shown = rollout.model_copy(update={"trajectory": None}).model_dump_json(indent=2)
        raise SystemExit(f"a rollout should have got {reward:g}: {shown}")
    return rollout
