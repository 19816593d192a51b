"""The built-in agent with sub-agents, and how the calls of an agent that may hand on work run.

The order within one turn is that of open reproductions of PARL, so that its results do not depend on who ends first:
every `create_subagent`, in the order of the calls; then every `assign_task` and every call that may run in parallel, in
waves of as many assigned tasks as may run at the same time; then the other calls, one after another.

Results are in the order of the calls. In a turn with the final answer, no task is assigned. A sub-agent ends before the
turn that started it, however that ends.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import TypeVar

from pydantic import ValidationError

from api_schemas.rollouts import StopReason
from api_schemas.rollouts.trees import NodeParent
from api_schemas.trajectories import Message, ToolCall
from rollout_service.activity import in_lane
from rollout_service.agents.parallel.ledger import Ledger, TurnSteps, Wave
from rollout_service.agents.parallel.settings import ParallelSettings
from rollout_service.agents.parallel.subagent import Branch, WaitingClock
from rollout_service.agents.parallel.tools import (
    ASSIGN,
    ASSIGN_SPEC,
    CREATE,
    CREATE_SPEC,
    MAX_CHARS,
    MAX_NAME_CHARS,
    created_text,
)
from rollout_service.agents.parallel.tree import AgentTree
from rollout_service.agents.tool_calling.agent import ToolCallingAgent, ToolCalls, context_of, message_of
from rollout_service.agents.tool_calling.builtin_tools import FINISH
from rollout_service.agents.tool_calling.tools import Arguments, Tool, ToolInputError, by_name, explain
from rollout_service.episodes import Episode, SubagentSlot
from rollout_service.tokens import ToolSpec
from sandboxes.task_groups import open_task_group

ABANDONED = "not done: the turn has the final answer"
OVER_CAP = "not done: {limit} tasks may be assigned in one turn; assign it in a later turn"
OVER_TOTAL = "not done: {limit} tasks were assigned, and no more can be"


class ParallelCalls:
    """Implements `tool_calling.agent.CallRunner`."""

    def __init__(
        self,
        tree: AgentTree,
        tools: Sequence[Tool],
        subagent_tools: Sequence[Tool],
        *,
        node_id: str = "",
        depth: int = 0,
        allowance: int | None = None,
        max_tool_calls: int | None = None,
        slot: SubagentSlot | None = None,
    ) -> None:
        """`node_id` is "" for the root; `depth` is the number of agents above.

        `allowance` limits the steps that may follow each other from its first turn on, and `max_tool_calls` its calls
        of `tools`; None sets no limit. `slot` is the one that it lends to its sub-agents.
        """
        self._tree = tree
        self._direct = ToolCalls(tools)
        self._subagent_tools = subagent_tools
        self._node_id = node_id
        self._depth = depth
        self._allowance = allowance
        self._max_tool_calls = max_tool_calls
        self._slot = slot
        self._delegates = depth < tree.settings.max_depth
        self._roster = SubagentRegistry(tree.settings.max_agents)
        self._exhausted = False
        self.ledger = Ledger()

    @property
    def definitions(self) -> list[ToolSpec]:
        """The direct tools, the two for sub-agents, and `finish` last."""
        return with_delegation(self._direct.definitions) if self._delegates else self._direct.definitions

    def stop_reason(self, episode: Episode) -> StopReason | None:
        if self._exhausted:
            return StopReason.MAX_TOOL_CALLS
        if self._allowance is not None and self._used(episode) >= self._allowance:
            return StopReason.MAX_CRITICAL_STEPS
        return None

    def _used(self, episode: Episode) -> int:
        return self.ledger.steps(episode.policy.usage.turns).scheduled

    async def run(self, episode: Episode, calls: Sequence[ToolCall]) -> list[Message]:
        number = episode.policy.usage.turns - 1
        direct = [call for call in calls if not self._is_delegation(call)]
        charged = sum(self._direct.knows(call) and call.name != FINISH.name for call in direct)
        self.ledger.direct_calls += charged
        turn = self.ledger.turn(number, max(1, charged if self._tree.settings.charge_direct_calls else 1))
        if self._max_tool_calls is not None and self.ledger.direct_calls > self._max_tool_calls:
            self._exhausted = True
            return [message_of(call, "not done") for call in calls]
        if len(direct) == len(calls):
            return await self._direct.run(episode, calls)
        if any(call.name == FINISH.name and self._direct.knows(call) for call in direct):
            return await self._answer(episode, calls, direct)
        return await self._delegate(episode, calls, number, turn)

    def _is_delegation(self, call: ToolCall, *names: str) -> bool:
        return self._delegates and call.error is None and call.name in (names or (CREATE, ASSIGN))

    async def _answer(self, episode: Episode, calls: Sequence[ToolCall], direct: Sequence[ToolCall]) -> list[Message]:
        """Let the final answer win over the tasks that its turn assigns."""
        abandoned = sum(self._is_delegation(call, ASSIGN) for call in calls)
        self._tree.assigns["attempted"] += abandoned
        self._tree.assigns["abandoned"] += abandoned
        answered = {message.tool_call_id: message for message in await self._direct.run(episode, direct)}
        if not answered:
            return []
        return [answered.get(call.id) or message_of(call, ABANDONED) for call in calls]

    async def _delegate(
        self, episode: Episode, calls: Sequence[ToolCall], number: int, turn: TurnSteps
    ) -> list[Message]:
        texts: dict[int, str] = {}
        branches: dict[int, Branch] = {}
        for index, call in enumerate(calls):
            if self._is_delegation(call, CREATE):
                texts[index] = self._create(call)
        for index, call in enumerate(calls):
            if self._is_delegation(call, ASSIGN):
                accepted = self._accept(episode, call, number, len(branches))
                if isinstance(accepted, Branch):
                    branches[index] = accepted
                else:
                    texts[index] = accepted
        beside = [
            index
            for index, call in enumerate(calls)
            if not self._is_delegation(call) and self._direct.is_parallel(call)
        ]
        started = time.perf_counter()
        try:
            await self._run_waves(episode, calls, branches, beside, texts, turn)
        finally:
            episode.tool_calls += len(texts)
            episode.tool_seconds += time.perf_counter() - started
        rest = [index for index in range(len(calls)) if index not in texts]
        answers = await self._direct.run(episode, [calls[index] for index in rest])
        if rest and not answers:  # a tool has ended the agent
            return []
        texts |= {index: message.content for index, message in zip(rest, answers, strict=True)}
        return [message_of(call, texts[index]) for index, call in enumerate(calls)]

    def _create(self, call: ToolCall) -> str:
        try:
            return self._roster.create(call)
        except ToolInputError as error:
            return str(error)
        finally:
            self.ledger.created = len(self._roster)

    def _accept(self, episode: Episode, call: ToolCall, turn: int, accepted: int) -> Branch | str:
        """Return the sub-agent to start, or why there is none."""
        assigns, settings = self._tree.assigns, self._tree.settings
        assigns["attempted"] += 1
        try:
            wanted, system = self._roster.assignment(call)
        except ToolInputError as error:
            assigns["refused"] += 1
            return str(error)
        if accepted >= settings.max_assigns_per_turn:
            assigns["over_cap"] += 1
            return OVER_CAP.format(limit=settings.max_assigns_per_turn)
        if self._tree.accepted >= settings.max_assigns:
            assigns["over_cap"] += 1
            return OVER_TOTAL.format(limit=settings.max_assigns)
        self._tree.accepted += 1
        is_new = self._tree.is_new(system, wanted.prompt)
        wave = accepted // (settings.max_width or settings.max_assigns_per_turn)
        return Branch(
            tree=self._tree,
            parent_episode=episode,
            parent=NodeParent(node_id=self._node_id, turn=turn, call_id=call.id, wave=wave),
            agent=wanted.agent,
            system=system,
            user=wanted.prompt,
            duplicate=not is_new,
            make_calls=self._for_subagent,
        )

    def _for_subagent(self, node_id: str, allowance: int | None, slot: SubagentSlot) -> ParallelCalls:
        return ParallelCalls(
            self._tree,
            self._subagent_tools,
            self._subagent_tools,
            node_id=node_id,
            depth=self._depth + 1,
            allowance=allowance,
            max_tool_calls=self._tree.settings.subagent.max_tool_calls,
            slot=slot,
        )

    async def _run_waves(
        self,
        episode: Episode,
        calls: Sequence[ToolCall],
        branches: dict[int, Branch],
        beside: Sequence[int],
        texts: dict[int, str],
        turn: TurnSteps,
    ) -> None:
        """Run `beside` with the first wave; put all results in `texts`."""
        context = context_of(episode)
        waves: dict[int, list[int]] = {0: []} if beside else {}
        for index, branch in branches.items():
            waves.setdefault(branch.parent.wave, []).append(index)

        async def one(index: int, clock: WaitingClock) -> None:
            texts[index] = await branches[index].run(clock)
            self.ledger.result_chars += len(branches[index].result)

        async def other(index: int, clock: WaitingClock) -> None:
            with clock.working(), in_lane(calls[index].id):
                result = await self._direct.run_one(calls[index], context)
            texts[index] = result.text
            if result.failed:
                episode.tool_error_turns.add(episode.policy.usage.turns - 1)

        for number, wave in sorted(waves.items()):
            allowance = None if self._allowance is None else max(0, self._allowance - self._used(episode))
            for index in wave:
                branches[index].allowance = allowance
            async with self._wave(turn, [branches[index] for index in wave]):
                with WaitingClock(episode.clock) as clock:
                    async with open_task_group() as tasks:
                        for index in wave:
                            tasks.start_soon(one, index, clock)
                        for index in beside if number == 0 else ():
                            tasks.start_soon(other, index, clock)

    @asynccontextmanager
    async def _wave(self, turn: TurnSteps, branches: Sequence[Branch]) -> AsyncIterator[None]:
        """Enter a wave in the ledger, however it ends; lend it the agent's own slot."""
        if not branches:
            yield
            return
        wave = Wave(branches[0].parent.turn, branches=[branch.times for branch in branches])
        self.ledger.waves.append(wave)
        began = time.perf_counter()
        try:
            async with self._slot.lent() if self._slot else nullcontext():
                yield
        finally:
            wave.seconds = time.perf_counter() - began
            wave.distinct = sum(branch.has_begun and not branch.duplicate for branch in branches)
            turn.waves.append([branch.steps for branch in branches])


class ParallelAgent:
    """The policy decides whether, when and how widely to hand on work; `Episode` has its record, however it ends."""

    def __init__(self, settings: ParallelSettings, tools: Sequence[Tool], subagent_tools: Sequence[Tool]) -> None:
        self._settings = settings
        self._tools = list(by_name(tools).values())
        self._subagent_tools = list(by_name(subagent_tools).values())

    @property
    def definitions(self) -> list[ToolSpec]:
        return with_delegation([tool.definition for tool in self._tools])

    async def run(self, episode: Episode, messages: Sequence[Message]) -> StopReason:
        episode.nodes.clear()
        tree = AgentTree(self._settings, episode, episode.require_subagents())
        calls = ParallelCalls(tree, self._tools, self._subagent_tools, allowance=self._settings.max_critical_steps)
        try:
            return await ToolCallingAgent(calls=calls).run(episode, messages)
        finally:
            episode.work = tree.work(calls.ledger)


def with_delegation(direct: Sequence[ToolSpec]) -> list[ToolSpec]:
    """Insert the two for sub-agents before `finish`."""
    last = [tool for tool in direct if tool["function"]["name"] == FINISH.name]
    return [*(tool for tool in direct if tool not in last), CREATE_SPEC, ASSIGN_SPEC, *last]


class Creation(Arguments):
    name: str
    system_prompt: str


class Assignment(Arguments):
    agent: str
    prompt: str


A = TypeVar("A", Creation, Assignment)


class SubagentRegistry:
    """The sub-agents of one agent, by name.

    A call that cannot be carried out as written raises ToolInputError with what to write instead.
    """

    def __init__(self, max_agents: int) -> None:
        self._prompts: dict[str, str] = {}
        self._max_agents = max_agents

    def __len__(self) -> int:
        return len(self._prompts)

    def create(self, call: ToolCall) -> str:
        """Return the text for the policy; the same call may be repeated."""
        wanted = _read(call, Creation, CREATE)
        _check(CREATE, "name", wanted.name, MAX_NAME_CHARS)
        _check(CREATE, "system_prompt", wanted.system_prompt, MAX_CHARS)
        known = self._prompts.get(wanted.name)
        if known is not None and known != wanted.system_prompt:
            raise ToolInputError(f"there is a sub-agent {wanted.name!r} with another system prompt; take another name")
        if known is None and len(self._prompts) >= self._max_agents:
            raise ToolInputError(f"there are {self._max_agents} sub-agents, and no more can be created")
        self._prompts[wanted.name] = wanted.system_prompt
        return created_text(wanted.name)

    def assignment(self, call: ToolCall) -> tuple[Assignment, str]:
        """Return the assignment and the sub-agent's system prompt."""
        wanted = _read(call, Assignment, ASSIGN)
        if wanted.agent not in self._prompts:
            names = ", ".join(self._prompts) or "none; create one first"
            raise ToolInputError(f"there is no sub-agent {wanted.agent[:MAX_NAME_CHARS]!r}. Sub-agents: {names}")
        _check(ASSIGN, "prompt", wanted.prompt, MAX_CHARS)
        return wanted, self._prompts[wanted.agent]


def _read(call: ToolCall, model: type[A], tool: str) -> A:
    try:
        return model.model_validate(call.arguments)
    except ValidationError as error:
        raise ToolInputError(f"wrong arguments for {tool}: {explain(error)}") from error


def _check(tool: str, field: str, text: str, longest: int) -> None:
    if not text.strip():
        raise ToolInputError(f"wrong arguments for {tool}: {field} is empty")
    if len(text) > longest:
        raise ToolInputError(
            f"wrong arguments for {tool}: {field} has {len(text)} characters, over {longest}; shorten it"
        )
