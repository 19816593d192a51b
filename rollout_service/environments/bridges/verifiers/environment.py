"""Tasksets of verifiers, with the built-in agent: their prompts, their tools, and their rewards.

Guarantees: the reward is that of the library's own `Task.score` for the same conversation, in a fresh sandbox. A task
whose hooks need more than the conversation is refused before it begins, since the library would leave their rewards
out. What fails in the library fails the rollout.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import FinishReason, Trajectory
from rollout_client.adapters.verifiers import message_fields
from rollout_service.agents.tool_calling.agent import ToolCallingAgent
from rollout_service.agents.tool_calling.tools import ToolContext, ToolResult, with_notes
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError, did_you_mean
from rollout_service.environments.bridges.process import LibraryProcess, library_in_sandbox, source_of
from rollout_service.environments.bridges.verifiers.catalog import (
    NAME,
    VERIFIERS,
    WORKER,
    ListedTask,
    Listing,
    list_tasksets,
)
from rollout_service.environments.bridges.verifiers.declaration import (
    TasksetTable,
    VerifiersDeclaration,
    read_declaration,
)
from rollout_service.environments.contract import Environment, EvaluateIn
from rollout_service.environments.dataset_files import SPLIT, InstanceFields, read_instance
from rollout_service.environments.declarative.declaration import spec_from
from rollout_service.environments.libraries import AddedPackages, Library
from rollout_service.episodes import Episode, Score
from rollout_service.tokens import ToolSpec

INSIDE: Final = "/opt/verifiers"
STATE: Final = "verifiers_state"
"""The tools' state for the rewards, in an episode's state."""
STOP: Final = "verifiers_stop"
"""Why the agent stopped."""
SCORE_SHARE: Final = 0.9
"""The part of the evaluation's time that the library may take; its failure is then told from the stage's deadline."""
PROCESS_ENV: Final = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class TasksetInstance(InstanceFields):
    index: int
    """In the taskset, counted from 0."""
    taskset: str | None = None
    """The name of the taskset; not needed if the environment has only one."""
    key: str | None = None
    """A task with another content has another key, and is refused."""


class VerifiersEnvironment(Environment):
    def __init__(
        self,
        declaration: VerifiersDeclaration,
        listings: list[Listing],
        binds: dict[str, str] | None = None,
    ) -> None:
        """`binds` has folders of the library and of packages by their path inside."""
        self.spec = spec_from(declaration, evaluate_in=EvaluateIn.FRESH, binds=binds or {})
        self._tasksets: dict[str, tuple[TasksetTable, Listing]] = {
            table.called: (table, listing) for table, listing in zip(declaration.taskset, listings, strict=True)
        }
        self._tools: list[ToolSpec] = []

    def findings(self) -> list[str]:
        return [
            f"the taskset {name!r} cannot be used: {listing.problem}"
            for name, (_, listing) in self._tasksets.items()
            if listing.problem is not None
        ]

    def warnings(self) -> list[str]:
        found = []
        for name, (_, listing) in self._tasksets.items():
            problems = [task.problem for task in listing.tasks if task.problem is not None]
            if problems:
                found.append(f"{len(problems)} tasks of {name!r} cannot be run, the first since {problems[0]}")
        return found

    def check(self, instance: dict[str, JsonValue]) -> None:
        self._find(instance)

    def for_instance(self, instance: dict[str, JsonValue]) -> Self:
        _, listing, task = self._find(instance)
        specific = copy.copy(self)
        specific._tools = listing.tools
        if any(message.role == "assistant" for message in task.messages):
            # A replay would take the turn that the prompt shows for the policy's own.
            specific.replayable = "never"
        if task.agent_seconds is not None:
            seconds = min(task.agent_seconds, self.spec.limits.agent_seconds)
            limits = self.spec.limits.model_copy(update={"agent_seconds": seconds})
            specific.spec = self.spec.model_copy(update={"limits": limits})
        return specific

    def tool_definitions(self) -> list[ToolSpec]:
        return self._tools

    async def run(self, episode: Episode) -> StopReason:
        _, listing, task = self._find(episode.instance)
        if not listing.tools:
            stopped = await ToolCallingAgent([]).run(episode, task.messages)
        else:
            stopped = await self._run_with_tools(episode, listing, task)
        episode.state[STOP] = stopped
        return stopped

    async def _run_with_tools(self, episode: Episode, listing: Listing, task: ListedTask) -> StopReason:
        async with library_in_sandbox(episode.require_sandbox(), self._command(), NAME, env=PROCESS_ENV) as process:
            tools = await open_tools(process, self._request(episode), listing.tools)
            stopped = await ToolCallingAgent(tools).run(episode, task.messages)
            episode.state[STATE] = await read_state(process)
            return stopped

    async def evaluate(self, episode: Episode) -> Score:
        _, listing, task = self._find(episode.instance)
        request = {
            "op": "score",
            "task": self._request(episode),
            "tools": listing.tools,
            "messages": [message_fields(message) for message in episode.policy.messages],
            "first_messages": len(task.messages),
            "turns": library_turns(episode.policy.trajectory()),
            "state": episode.state.get(STATE),
            "stop": episode.state.get(STOP, StopReason.ANSWERED),
            "agent_seconds": episode.clock.seconds,
        }
        seconds = SCORE_SHARE * episode.limits.evaluate_seconds
        async with library_in_sandbox(episode.require_sandbox(), self._command(), NAME, env=PROCESS_ENV) as process:
            reply = await process.ask(request, min(seconds, task.scoring_seconds or seconds))
        return read_score(reply)

    def dataset(self) -> list[dict[str, JsonValue]]:
        instances: list[dict[str, JsonValue]] = []
        for name, (table, listing) in self._tasksets.items():
            split: dict[str, JsonValue] = {SPLIT: table.split} if table.split else {}
            instances += [
                {"taskset": name, "index": index, "key": task.key, **split}
                for index, task in enumerate(listing.tasks)
                if task.problem is None
            ]
        return instances

    def _find(self, instance: dict[str, JsonValue]) -> tuple[TasksetTable, Listing, ListedTask]:
        wanted = read_instance(TasksetInstance, instance)
        name = wanted.taskset
        if name is None and len(self._tasksets) == 1:
            name = next(iter(self._tasksets))
        if name is None or name not in self._tasksets:
            what = "the taskset is not named" if name is None else f"there is no taskset {name!r}"
            raise _refusal("taskset", what + did_you_mean(name or "", self._tasksets), known=self._tasksets)
        table, listing = self._tasksets[name]
        if listing.problem is not None:
            raise _refusal("taskset", f"the taskset {name!r} cannot be used here: {listing.problem}")
        if not 0 <= wanted.index < len(listing.tasks):
            raise _refusal("index", f"the taskset {name!r} has the tasks 0 to {len(listing.tasks) - 1}")
        task = listing.tasks[wanted.index]
        if task.problem is not None:
            raise _refusal("index", f"the task {wanted.index} of {name!r} cannot be run here: {task.problem}")
        if wanted.key not in (None, task.key):
            raise _refusal("key", f"the task {wanted.index} of {name!r} is another one now: {task.key}")
        return table, listing, task

    def _request(self, episode: Episode) -> dict[str, Any]:
        table, listing, task = self._find(episode.instance)
        return {
            **table.model_dump(include={"id", "config"}),
            **listing.model_dump(include={"task_type", "data_type"}),
            **task.model_dump(include={"data", "key"}),
        }

    def _command(self) -> list[str]:
        return ["python3", "-sP", "-c", source_of(WORKER), *self.spec.binds]


def read_score(reply: dict[str, Any]) -> Score:
    """Call a metric `metric_NAME` if a reward has its name."""
    rewards: dict[str, float] = reply["rewards"]
    metrics = {f"metric_{name}" if name in rewards else name: value for name, value in reply["metrics"].items()}
    return Score(float(reply["reward"]), {**rewards, **metrics})


def load_verifiers(folder: Path, library: Library = VERIFIERS) -> VerifiersEnvironment:
    folder = folder.resolve()
    declaration = read_declaration(folder)
    packages = [(folder / name).resolve() for name in declaration.packages]
    if declaration.requirements:
        library.python()
        packages.append(added_packages(declaration, folder, library).require())
    listings = list_tasksets(library, declaration.taskset, packages, folder)
    own = {f"{INSIDE}-{number}": str(path) for number, path in enumerate(packages, 1)}
    return VerifiersEnvironment(declaration, listings, {INSIDE: str(library.packages), **own})


def added_packages(declaration: VerifiersDeclaration, folder: Path, library: Library = VERIFIERS) -> AddedPackages:
    return AddedPackages(library, tuple(declaration.requirements), folder.resolve())


def _refusal(field: str, message: str, known: dict[str, Any] | None = None) -> InvalidFieldError:
    hint = f"Known tasksets: {', '.join(known)}." if known else ""
    return InvalidFieldError.at(f"instance.{field}", message, hint=hint)


def library_turns(trajectory: Trajectory) -> list[dict[str, Any]]:
    return [
        {"truncated": reason is FinishReason.LENGTH, "tokens": _tokens(trajectory, number)}
        for number, reason in enumerate(trajectory.finish_reasons)
    ]


def _tokens(trajectory: Trajectory, turn: int) -> dict[str, Any] | None:
    """Return None if ids were not recorded, as by a scripted policy."""
    for segment in [*trajectory.segments, *trajectory.untrained]:
        if turn not in segment.turn_ids:
            continue
        start = segment.turn_ids.index(turn)
        end = len(segment.turn_ids) - segment.turn_ids[::-1].index(turn)
        return {
            "prompt_ids": segment.token_ids[:start],
            "completion_ids": segment.token_ids[start:end],
            "completion_logprobs": segment.logprobs[start:end],
        }
    return None


# A tool's own error is a result that the policy reads, as with the library's servers; a library that ends, or a tool
# that answers no more, fails the rollout.

OPEN_SECONDS: Final = 240.0
"""The limit of importing the library and setting the tools up."""
STATE_SECONDS: Final = 30.0
GRACE_SECONDS: Final = 3.0
"""The agent waits longer than a tool's limit, so that the tool is stopped in its own process."""


class LibraryTool:
    """Implements `tool_calling.tools.Tool`."""

    parallel = False

    def __init__(self, process: LibraryProcess, definition: ToolSpec) -> None:
        self._process = process
        self.definition = definition
        self.name = str(definition["function"]["name"])

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        request = {"op": "call", "name": self.name, "arguments": arguments, "seconds": context.seconds}
        reply = await self._process.ask(request, context.seconds + GRACE_SECONDS)
        return ToolResult(with_notes(str(reply["text"]), [], context.output_chars))


async def open_tools(
    process: LibraryProcess, task: dict[str, Any], definitions: Sequence[ToolSpec]
) -> list[LibraryTool]:
    found = (await process.ask({"op": "open", "task": task}, OPEN_SECONDS))["tools"]
    tools = [LibraryTool(process, definition) for definition in definitions]
    if found != sorted(tool.name for tool in tools):
        raise EnvironmentFailedError(
            f"the task has other tools than its taskset was listed with: {', '.join(found) or 'none'}",
            hint="Restart the service, which lists the taskset again.",
        )
    return tools


async def read_state(process: LibraryProcess) -> str:
    reply = await process.ask({"op": "state"}, STATE_SECONDS)
    if "state" not in reply:  # the answer to a call that the agent's time limit cut off
        reply = await process.ask({"op": "state"}, STATE_SECONDS)
    return str(reply["state"])
