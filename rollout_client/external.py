"""A rollout whose agent is a program of the caller's, with the client of its choice.

Leaving the block reports the end, with the reward that was set or without one; an exception is reported as the
program's failure. The report is about this attempt: if the service has begun another one, that one is left alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, TypedDict

import anyio

from rollout_client import _wire as wire
from rollout_client.errors import ClientError, ConflictError, NotFoundError

if TYPE_CHECKING:
    from rollout_client._connection import Connection

LONG_POLL_SECONDS = 30.0
END_SECONDS = 10.0
END_CHARS = 10_000


class RolloutOverError(ClientError):
    """The rollout ended before its program began; `rollout` says why."""

    def __init__(self, rollout: wire.Rollout) -> None:
        why = rollout.error.message if rollout.error is not None else rollout.state
        super().__init__(f"rollout {rollout.rollout_id} ended before its program began: {why}")
        self.rollout = rollout

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rollout,)


class OpenAIOptions(TypedDict):
    """The arguments of `openai.OpenAI` and `openai.AsyncOpenAI`."""

    base_url: str
    api_key: str


class AnthropicOptions(TypedDict):
    """The arguments of `anthropic.Anthropic` and `anthropic.AsyncAnthropic`."""

    base_url: str
    api_key: str


class GoogleOptions(TypedDict):
    """The arguments of `google.genai.Client`."""

    api_key: str
    http_options: dict[str, str]


class ExternalRollout:
    """A rollout that the caller's program works on; made by `RolloutClient.external_rollout`."""

    def __init__(self, connection: Connection, rollout_id: str, task: wire.Task, access: wire.RolloutAccess) -> None:
        self.rollout_id = rollout_id
        self.task = task
        self.access = access
        """The URL, the key and the name of the model."""
        self.ended = False
        self._connection = connection

    @property
    def model(self) -> str:
        return self.access.model

    @property
    def openai(self) -> OpenAIOptions:
        """The arguments for OpenAI's client: `OpenAI(**rollout.openai)`."""
        return {"base_url": f"{self.access.url}/v1", "api_key": self.access.key}

    @property
    def anthropic(self) -> AnthropicOptions:
        """The arguments for Anthropic's client: `Anthropic(**rollout.anthropic)`."""
        return {"base_url": self.access.url, "api_key": self.access.key}

    @property
    def google(self) -> GoogleOptions:
        """The arguments for Google's client: `genai.Client(**rollout.google)`."""
        return {"api_key": self.access.key, "http_options": {"base_url": self.access.url}}

    async def end(
        self,
        reward: float | None = None,
        *,
        reward_parts: dict[str, float] | None = None,
        answer: str | None = None,
        error: str | None = None,
    ) -> None:
        """Report that the agent has ended: with its reward, or without one, so that the environment scores it.

        `answer` is the final answer to score, `error` says that the program failed.

        Raises:
            ConflictError: The attempt is over, or another end was reported before.
            NotFoundError: The service no longer waits for this program.
        """
        report = wire.RolloutEnd(
            reward=reward,
            reward_parts=reward_parts or {},
            answer=answer,
            error=error[:END_CHARS] if error is not None else None,
            attempt=self.access.attempt,
        )
        path = f"/v1/rollouts/{self.rollout_id}/end"
        body = report.model_dump(mode="json", exclude_defaults=True)
        await self._connection.call(wire.Rollout, "POST", path, body)
        self.ended = True

    async def result(self) -> wire.Rollout:
        """Wait for the rollout's end, and return it with its trajectory."""
        return await wait_for_end(self._connection, self.rollout_id)


async def wait_for_end(connection: Connection, rollout_id: str) -> wire.Rollout:
    path, params = f"/v1/rollouts/{rollout_id}", {"trajectory": "true"}
    while True:
        rollout = await connection.call(wire.Rollout, "GET", path, params=params, wait_seconds=LONG_POLL_SECONDS)
        if rollout.state.terminal:
            return rollout


@asynccontextmanager
async def open_external(connection: Connection, request: wire.RolloutRequest) -> AsyncGenerator[ExternalRollout]:
    """Submit a rollout, wait until its program may begin, and report its end when the block is left.

    A wait that is given up cancels the rollout; the request must have its id.

    Raises:
        RolloutOverError: The rollout ended before.
    """
    try:
        rollout, access = await _begun(connection, request.model_copy(update={"agent": wire.AgentKind.EXTERNAL}))
    except ClientError:
        raise
    except BaseException:
        # Nobody will drive it, and it would hold a worker until its deadline.
        with anyio.move_on_after(END_SECONDS, shield=True), suppress(ClientError):
            await connection.call(None, "DELETE", f"/v1/rollouts/{request.rollout_id}")
        raise
    external = ExternalRollout(connection, rollout.rollout_id, rollout.task, access)
    try:
        yield external
    except BaseException as failure:
        if not external.ended:
            await _report_failure(external, failure)
        raise
    if not external.ended:
        await external.end()


async def _begun(connection: Connection, request: wire.RolloutRequest) -> tuple[wire.Rollout, wire.RolloutAccess]:
    """Submit a rollout, and wait until its program may begin."""
    body = request.model_dump(mode="json", exclude_defaults=True)
    rollout = await connection.call(wire.Rollout, "POST", "/v1/rollouts", body)
    path, params = f"/v1/rollouts/{rollout.rollout_id}", {"until": "access"}
    while rollout.access is None:
        if rollout.state.terminal:
            raise RolloutOverError(rollout)
        rollout = await connection.call(wire.Rollout, "GET", path, params=params, wait_seconds=LONG_POLL_SECONDS)
    return rollout, rollout.access


async def _report_failure(external: ExternalRollout, failure: BaseException) -> None:
    """Report the program's failure; the caller sees its own exception."""
    why = f"{type(failure).__name__}: {failure}".encode(errors="replace").decode()  # a file's name can be any bytes
    with anyio.move_on_after(END_SECONDS, shield=True):
        try:
            await external.end(error=why)
        except (ConflictError, NotFoundError):
            pass  # the service no longer waits for this program
        except ClientError as error:
            failure.__context__ = error
