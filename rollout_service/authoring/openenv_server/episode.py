"""One episode whose policy is a client of OpenEnv.

Guarantees: the steps are those of a trial (`pipeline.trial`), which closes its sandbox however it ends; the client
learns the reward only at the end; a failure is an error and never a reward.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Final

import anyio
from pydantic import JsonValue

from api_schemas.rollouts import Usage
from api_schemas.trajectories import ForkReason, Message, ToolCall, Trajectory
from rollout_service.authoring.openenv_server.messages import (
    EpisodeState,
    SeenMessage,
    TurnAction,
    TurnObservation,
    failure,
    observation,
)
from rollout_service.base.errors import EnvironmentFailedError, ServiceError, describe
from rollout_service.environments.contract import Environment
from rollout_service.episodes import PolicyTurn
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import NO_MODELS, OtherModels, Trial, play
from rollout_service.tokens import ToolSpec

OVER: Final = failure("EXECUTION_ERROR", "no episode is under way; send a reset first")


class RemotePolicy:
    """Lets a client answer; implements `episodes.Policy`. Nothing is sampled here, so there are no token ids."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self.messages: list[Message] = []
        self.engine_seconds = 0.0
        self.usage = Usage()
        self._tools = list(tools)
        self._seen, self.seen = anyio.create_memory_object_stream[TurnObservation](1)
        self.act, self._actions = anyio.create_memory_object_stream[TurnAction](1)

    async def respond(self, new_messages: list[Message], *, max_tokens: int) -> PolicyTurn:  # noqa: ARG002
        """Show the messages to the client, and wait for its action."""
        self.messages += new_messages
        messages = [SeenMessage(role=message.role, content=message.content) for message in new_messages]
        tools = [] if self.usage.turns else [dict(tool) for tool in self._tools]
        await self._seen.send(TurnObservation(messages=messages, tools=tools))
        began = anyio.current_time()
        action = await self._actions.receive()
        self.engine_seconds += anyio.current_time() - began
        turn = self.usage.turns + 1
        calls = [
            ToolCall(
                id=f"call-{turn}-{number}",
                name=one.name,
                arguments=one.arguments,
                raw=json.dumps(one.model_dump(mode="json")),
            )
            for number, one in enumerate(action.tool_calls, 1)
        ]
        self.usage = Usage(turns=turn, tool_calls=self.usage.tool_calls + len(calls))
        message = Message(role="assistant", content=action.text, tool_calls=calls)
        self.messages.append(message)
        return PolicyTurn(message=message, truncated=False, malformed=0)

    def close(self) -> None:
        """End both directions; idempotent."""
        for stream in (self._seen, self.seen, self.act, self._actions):
            stream.close()

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        """Show these tools instead."""
        self._tools = list(tools)

    def replace(
        self,
        messages: list[Message],  # noqa: ARG002 - it always refuses
        reason: ForkReason = ForkReason.HISTORY_EDITED,
    ) -> None:
        """Refuse: a client that keeps its own history cannot be told."""
        raise EnvironmentFailedError(
            f"this environment replaces the conversation ({reason}), which OpenEnv cannot"
        )

    def trajectory(self) -> Trajectory:
        """Return the messages."""
        return Trajectory(segments=[], messages=list(self.messages), finish_reasons=[], fork_counts={})


class RemoteEpisode:
    """An episode from its reset on; `run` runs in a task group, and `step` is called beside it."""

    def __init__(
        self,
        environment: Environment,
        instance: dict[str, JsonValue],
        sandboxes: SandboxSource,
        episode_id: str | None,
        models: OtherModels = NO_MODELS,
    ) -> None:
        """`instance` is one that the environment accepts."""
        self._environment = environment
        self._instance = instance
        self._sandboxes = sandboxes
        self._episode_id = episode_id
        self._models = models
        self._policy = RemotePolicy(environment.for_instance(instance).tool_definitions())
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._outcome = OVER
        self._is_told = False
        self._steps = 0

    @property
    def state(self) -> EpisodeState:
        """How far it has come."""
        return EpisodeState(episode_id=self._episode_id, step_count=self._steps)

    async def run(self) -> None:
        """Play the episode; at its end, the outcome is there and the sandbox is not."""
        limits = self._environment.for_instance(self._instance).spec.limits
        seconds = limits.init_seconds + limits.rollout_seconds + limits.evaluate_seconds
        try:
            with self._scope, anyio.fail_after(seconds):
                trial = await play(
                    self._environment, self._instance, self._policy, self._sandboxes, self._models
                )
                self._outcome = _result(trial)
        except TimeoutError:
            self._outcome = failure("EXECUTION_ERROR", f"the episode took longer than {seconds:g} s")
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is told to the client
            self._outcome = _error(error)
        finally:
            self._ended.set()
            self._policy.close()

    async def step(self, action: TurnAction) -> dict[str, object]:
        """Play a turn of the client, and return the reply."""
        if self._is_told:
            return OVER
        if not self._ended.is_set():  # a limit may have ended it since the last step
            self._steps += 1
            self._policy.act.send_nowait(action)
        return await self.told()

    async def told(self) -> dict[str, object]:
        """Wait for the policy's next turn or for the end."""
        try:
            return observation(await self._policy.seen.receive())
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self._is_told = True
            return self._outcome

    async def end(self) -> None:
        """Cancel it, and wait until its sandbox is closed."""
        self._scope.cancel()
        await self._ended.wait()


def _result(trial: Trial) -> dict[str, object]:
    score = trial.score
    if not math.isfinite(score.reward):
        return failure("EXECUTION_ERROR", f"the reward {score.reward} is not a finite number")
    metadata = {
        "stop_reason": trial.stop_reason.value,
        "reward_parts": dict(score.parts),
        "notes": list(trial.episode.notes),
    }
    return observation(TurnObservation(metadata=metadata), score.reward, done=True)


def _error(error: Exception) -> dict[str, object]:
    info = describe(error)
    hint = f" ({info.hint})" if isinstance(error, ServiceError) and info.hint else ""
    return failure("EXECUTION_ERROR", f"{info.code}: {info.message}{hint}")
