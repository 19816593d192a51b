"""verifiers: a taskset and an environment of its v1 interface, for prime-rl and vf-eval. Tested with verifiers 0.4.0.

    # rollout_tasks.py, a module that verifiers can import: its name is the id of the taskset
    from rollout_client.adapters.verifiers import ServiceEnv, ServiceTaskset
    __all__ = ["ServiceEnv", "ServiceTaskset"]

The service's address is ROLLOUT_URL, its key ROLLOUT_KEY. verifiers' own server serves the environment, so the protocol
between it and a trainer is that of the installed version.

An episode is one rollout, with one trace. Each segment is a branch of its own, so prime-rl makes a training sample of
each, with the mask and the log-probabilities of the service. A rollout without a reward is run again; if it still has
none, its episode has the error, `ok=False` and no trace, since verifiers' traces count as 0 without a reward. So
prime-rl and vf-eval count an error, and leave it out of groups, training and means.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from api_schemas.rollouts import Rollout, StopReason
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, Message
from rollout_client.adapters.samples import Sample, SampledTurn, conversation_of, samples_of, turns_of
from rollout_client.adapters.submit import NoRewardError, RolloutSubmitter, parse_task
from rollout_client.sync import SyncRolloutClient

STOPS = {
    StopReason.MAX_TURNS: "max_turns",
    StopReason.MAX_TOKENS: "max_output_tokens",
    StopReason.CONTEXT_FULL: "max_total_tokens",
}
"""Stop conditions that verifiers counts as truncated."""
PAGE = 1_000
"""How many instances of a data set are read with one request."""


def tasks_of(submitter: RolloutSubmitter, *, rows: Path | None, environment: str, split: str | None) -> Iterator[Task]:
    """Yield the tasks in a file of JSON Lines, or those that ship with an environment of the service.

    Raises:
        TaskRowError: A row does not name a task.
        ValueError: Neither a file nor an environment is given.
    """
    if rows is not None:
        with rows.open() as lines:
            yield from (parse_task(json.loads(line)) for line in lines if line.strip())
    elif environment:
        with SyncRolloutClient(submitter.url, submitter.key) as client:
            offset = 0
            while page := client.dataset(environment, limit=PAGE, offset=offset, split=split):
                yield from (Task(environment=environment, instance=instance) for instance in page)
                offset += len(page)
    else:
        raise ValueError("the taskset needs `environment`, a name of the service's, or `rows`, a file of JSON Lines")


@dataclass(frozen=True, slots=True)
class TraceNode:
    """A message, with the tokens that it adds to its branch."""

    message: Message
    token_ids: list[int] = field(default_factory=list)
    turn: SampledTurn | None = None
    """The turn that sampled all of the tokens, if the policy did."""


def branch_of(rollout: Rollout, sample: Sample) -> Iterator[TraceNode]:
    """Yield the nodes of a segment up to its last sampled token, each the child of the one before it.

    Texts are for reading only: if a compaction has removed turns from the conversation, they are empty.
    """
    messages, own = conversation_of(rollout)
    read, said = 0, 0
    for turn in turns_of(sample):
        context = turn.prompt_ids[read:]
        before, answer = [Message(role="user")], Message(role="assistant")
        if turn.number < len(own):
            before, answer = messages[said : own[turn.number]], messages[own[turn.number]]
            said = own[turn.number] + 1
        for message in before[:-1]:
            yield TraceNode(message)
        if context:
            yield TraceNode(before[-1] if before else Message(role="user"), context)
        yield TraceNode(answer, turn.sampled_ids, turn)
        read = len(turn.prompt_ids) + len(turn.sampled_ids)


def message_fields(message: Message) -> dict[str, Any]:
    """Return the fields of verifiers' message. A malformed call keeps the sampled text as its arguments."""
    if message.role == "assistant":
        calls = [
            {
                "id": call.id,
                "name": call.name or "",
                "arguments": call.raw if call.arguments is None else json.dumps(call.arguments),
            }
            for call in message.tool_calls
        ]
        return {
            "role": "assistant",
            "content": message.content,
            "reasoning_content": message.reasoning,
            "tool_calls": calls or None,
        }
    if message.role == "tool":
        answered = {"tool_call_id": message.tool_call_id or "", "name": message.name}
        return {"role": "tool", "content": message.content} | answered
    return {"role": "user" if message.role == "user" else "system", "content": message.content}


def fill_trace(trace: Any, rollout: Rollout, model: str) -> None:
    """Write a rollout that has a reward into verifiers' trace."""
    from verifiers.v1 import MessageNode, ModelCall
    from verifiers.v1.types import Usage

    reasons = rollout.trajectory.finish_reasons if rollout.trajectory is not None else []
    for sample in samples_of(rollout):
        parent = None
        for node in branch_of(rollout, sample):
            sampled = node.turn is not None
            trace.nodes.append(
                MessageNode(
                    parent=parent,
                    message=message_fields(node.message),
                    sampled=sampled,
                    token_ids=node.token_ids,
                    mask=[sampled] * len(node.token_ids),
                    logprobs=node.turn.logprobs if node.turn is not None else [],
                )
            )
            parent = len(trace.nodes) - 1
            if node.turn is not None:
                reason = reasons[node.turn.number] if node.turn.number < len(reasons) else FinishReason.STOP
                usage = Usage(prompt_tokens=len(node.turn.prompt_ids), completion_tokens=len(node.turn.sampled_ids))
                finish = "length" if reason is FinishReason.LENGTH else "stop"
                trace.calls.append(ModelCall(node=parent, model=model, finish_reason=finish, usage=usage))
    trace.info["rollout_id"] = rollout.rollout_id
    trace.record_metric("segments", len(samples_of(rollout)))
    trace.record_reward("reward", rollout.reward)
    trace.stop(STOPS.get(rollout.stop_reason or StopReason.ANSWERED, "agent_completed"))
    trace.ok = True


def error_type(error: Exception) -> str:
    """Return the type of an episode's error, by which verifiers can decide whether to try again."""
    if isinstance(error, NoRewardError):
        failed = error.rollout
        return failed.error.code if failed.error is not None else failed.state.value
    return type(error).__name__


class _EpisodesOfService:
    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.submitter = RolloutSubmitter.from_environment()

    async def run(self, task: Any, agents: Any) -> None:
        """Refuse: verifiers' agents have no part in it."""
        raise NotImplementedError("the service runs the agent")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Hold the connections to the service; verifiers' tool servers and its proxy are not needed."""
        try:
            yield
        finally:
            await self.submitter.aclose()

    async def run_episode(self, task: Any, ctx: Any, *, on_trace: Any = None, on_discard: Any = None) -> Any:
        """Run an episode; verifiers calls this. If there is no reward, the episode has an error and no trace."""
        import verifiers.v1 as vf

        del on_discard
        told = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = vf.Episode(env=vf.EnvInfo(id=self.config.env_id), task=told)
        try:
            rollout = await self._roll_out(task, ctx)
        except Exception as error:  # noqa: BLE001 - as in verifiers, a failure is data of its episode
            episode.errors.append(vf.Error(type=error_type(error), message=str(error)))
            return episode
        ran_with = {"model": ctx.model, "client": ctx.client, "sampling": ctx.sampling}
        agent = vf.AgentInfo(config=self.config.agent.model_copy(update=ran_with))
        trace = vf.Trace(task=told, agent=agent)
        fill_trace(trace, rollout, ctx.model)
        episode.traces.append(trace)
        episode.ok = True
        if on_trace is not None:
            on_trace(trace)
        return episode

    async def _roll_out(self, task: Any, ctx: Any) -> Rollout:
        given = Task(environment=task.data.environment, instance=task.data.instance)
        sampling = ctx.sampling.model_dump(exclude_none=True)
        most = sampling.get("max_tokens")
        request = self.submitter.request(given, sampling, max_turn_tokens=most, trainer="verifiers")
        return await self.submitter.run_scored(request)


@lru_cache(maxsize=1)
def make_classes() -> Mapping[str, type]:
    """Return the classes that need verifiers' base classes; the module has them as attributes."""
    import verifiers.v1 as vf

    class ServiceTaskData(vf.TaskData):  # type: ignore[misc]
        environment: str
        instance: dict[str, Any] = {}

    class ServiceTask(vf.Task[ServiceTaskData]):  # type: ignore[misc]
        pass

    class ServiceTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
        """Where the tasks come from."""

        environment: str = ""
        """An environment of the service, whose own instances are the tasks."""
        split: str | None = None
        rows: Path | None = None
        """A file of JSON Lines with `environment` and `instance`, instead."""

    class ServiceTaskset(vf.Taskset[ServiceTask, ServiceTasksetConfig]):  # type: ignore[misc]
        def load(self) -> Iterator[Any]:
            given = self.config
            service = RolloutSubmitter.from_environment()
            source = {"rows": given.rows, "environment": given.environment, "split": given.split}
            for task in tasks_of(service, **source):
                prompt = str(task.instance.get("question", ""))
                data = ServiceTaskData(prompt=prompt, **task.model_dump(mode="json"))
                yield ServiceTask(data, given.task)

    class ServiceEnvConfig(vf.EnvConfig):  # type: ignore[misc]
        """One agent, which the service runs; verifiers requires one, but its settings do nothing."""

        agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})

    class ServiceEnv(_EpisodesOfService, vf.Env[ServiceEnvConfig]):  # type: ignore[misc]
        pass

    made = (ServiceTaskData, ServiceTask, ServiceTasksetConfig, ServiceTaskset, ServiceEnvConfig, ServiceEnv)
    for one in made:
        one.__qualname__ = one.__name__
    return {one.__name__: one for one in made}


def __getattr__(name: str) -> Any:
    # Made on first use, since their bases are verifiers' own.
    if name.startswith("Service") and name in make_classes():
        return make_classes()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
