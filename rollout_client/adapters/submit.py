"""Rollouts for adapters: a trainer's row becomes a task, and a task becomes a rollout.

An error about a row names the field. A rollout is run once, however often its submission is repeated while the service
is away. A failed rollout is returned; only an error of the submission itself is raised.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import anyio
from anyio.from_thread import start_blocking_portal
from pydantic import JsonValue, ValidationError

from api_schemas.errors import sentences
from api_schemas.rollouts import Rollout, RolloutRequest, Sampling
from api_schemas.tasks import Limits, Task
from rollout_client.adapters.samples import samples_of
from rollout_client.client import RolloutClient, with_id

if sys.version_info < (3, 11):
    from exceptiongroup import ExceptionGroup

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8080"
PATIENCE_SECONDS = 600.0


class TaskRowError(ValueError):
    """A row of the trainer's data set does not name a task."""


class NoRewardError(RuntimeError):
    """A rollout has no reward after all attempts, and the trainer requires one."""

    def __init__(self, rollout: Rollout) -> None:
        cause = rollout.error
        end = "it sampled nothing" if rollout.reward is not None else f"it was {rollout.state.value}"
        why = f"{cause.code}: {sentences(cause.message, cause.hint)}" if cause else end
        super().__init__(
            f"rollout {rollout.rollout_id} of {rollout.task.environment!r} has no reward to train on: {why.strip()}"
        )
        self.rollout = rollout

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rollout,)  # trainers pass errors between processes


def task_text(task: Task) -> str:
    """Return a task as text, for trainers that pass only a prompt to an adapter; `parse_task` reads it."""
    return json.dumps(task.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)


def parse_task(row: object) -> Task:
    """Return the task in a row.

    A row is `{"environment": ..., "instance": {...}}`, the same as JSON text, or a list of messages whose last one has
    that text as its content. Other fields of the row are ignored.

    Raises:
        TaskRowError: The row does not name a task.
    """
    if isinstance(row, Task):
        return row
    if isinstance(row, Sequence) and not isinstance(row, str | bytes) and row:
        row = row[-1]
    if isinstance(row, Mapping) and "environment" not in row:
        row = row.get("content", row)
    row = _parsed(row)
    if not isinstance(row, Mapping) or "environment" not in row:
        raise TaskRowError("a row has no field `environment`; it names one of the service's environments")
    try:
        return Task.model_validate({"environment": row["environment"], "instance": _parsed(row.get("instance", {}))})
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise TaskRowError(f"the field `{where}` of a row is invalid: {problem['msg']}") from error


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise TaskRowError(f"{value[:80]!r} is not a task. Make prompts with task_text(task)") from error


def read_sampling(params: Mapping[str, Any]) -> Sampling:
    """Convert a trainer's sampling parameters to the service's, ignoring those that it does not have."""
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    given = {name: params[name] for name in names if params.get(name) is not None}
    if given.get("top_k") == 0:  # most trainers write 0 for all tokens
        given["top_k"] = -1
    stop = params.get("stop")
    if stop:
        given["stop"] = [stop] if isinstance(stop, str) else list(stop)
    return Sampling.model_validate(given)


async def run_in_order(calls: Sequence[Callable[[], Awaitable[T]]], *, concurrency: float = math.inf) -> list[T]:
    """Run calls at once, at most so many, and return their results in order; the first error cancels the others."""
    results: dict[int, T] = {}
    places = anyio.CapacityLimiter(concurrency)

    async def one(number: int, call: Callable[[], Awaitable[T]]) -> None:
        async with places:
            results[number] = await call()

    try:
        async with anyio.create_task_group() as tasks:
            for number, call in enumerate(calls):
                tasks.start_soon(one, number, call)
    except ExceptionGroup as group:  # a trainer should see the error itself
        raise group.exceptions[0] from group
    return [results[number] for number in range(len(calls))]


@dataclass(frozen=True, eq=False)
class RolloutSubmitter:
    url: str = DEFAULT_URL
    key: str | None = None
    pool: str = "policy"
    limits: Limits = field(default_factory=Limits)
    concurrency: int = 64
    """Rollouts of one batch at once."""
    retries: int = 2
    """How often a rollout without a reward is run again, for trainers that require one."""
    patience_seconds: float = PATIENCE_SECONDS
    _clients: WeakKeyDictionary[asyncio.AbstractEventLoop, RolloutClient] = field(
        default_factory=WeakKeyDictionary, repr=False
    )

    @classmethod
    def from_environment(cls, **given: Any) -> RolloutSubmitter:
        """Return a submitter for the service at ROLLOUT_URL, with the key in ROLLOUT_KEY, as on the command line."""
        url = os.environ.get("ROLLOUT_URL", DEFAULT_URL)
        return cls(**({"url": url, "key": os.environ.get("ROLLOUT_KEY")} | given))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the clients out: trainers send adapters to other processes, where these are useless."""
        return {name: value for name, value in self.__dict__.items() if name != "_clients"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _clients=WeakKeyDictionary())

    def request(
        self,
        row: object,
        params: Mapping[str, Any] | None = None,
        *,
        max_tokens: int | None = None,
        max_turn_tokens: int | None = None,
        **metadata: JsonValue,
    ) -> RolloutRequest:
        """Return a request for a row's task, with an id, so that sending it twice starts one rollout.

        `params` are the trainer's sampling parameters. `max_tokens` and `max_turn_tokens` are its limits; the
        submitter's own win.
        """
        limits = self.limits
        for name, most in (("max_tokens", max_tokens), ("max_turn_tokens", max_turn_tokens)):
            if most is not None and getattr(limits, name) is None:
                limits = limits.model_copy(update={name: most})
        return with_id(
            RolloutRequest(
                task=parse_task(row),
                pool=self.pool,
                sampling=read_sampling(params or {}),
                limits=limits,
                metadata=metadata,
            )
        )

    async def run(self, request: RolloutRequest) -> Rollout:
        """Run a rollout. Connections are kept for later calls in this event loop."""
        loop = asyncio.get_running_loop()
        if (client := self._clients.get(loop)) is None:
            for other in [reference() for reference in self._clients.keyrefs()]:
                if other is not None and other.is_closed():  # its client's connections would keep it
                    self._clients.pop(other, None)
            client = RolloutClient(self.url, self.key, patience_seconds=self.patience_seconds)
            self._clients[loop] = client
        return await client.run(request)

    async def run_scored(
        self, request: RolloutRequest, on_failure: Callable[[Rollout], object] | None = None
    ) -> Rollout:
        """Run a rollout for a trainer that requires a reward, again if it has none, at most `retries` times.

        `on_failure` gets each rollout without a reward that is run again.

        Raises:
            NoRewardError: The rollout still has no reward; the only alternative would be to make one up.
        """
        rollout = await self.run(request)
        for retry in range(1, self.retries + 1):
            if rollout.reward is not None and samples_of(rollout):
                break
            if on_failure is not None:
                on_failure(rollout)
            again = request.model_copy(update={"rollout_id": f"{request.rollout_id}.retry-{retry}"})
            rollout = await self.run(again)
        if rollout.reward is None or not samples_of(rollout):
            raise NoRewardError(rollout)
        return rollout

    async def aclose(self) -> None:
        """Close the connections of this event loop; the next `run` opens new ones."""
        if (client := self._clients.pop(asyncio.get_running_loop(), None)) is not None:
            await client.aclose()

    def run_all_blocking(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        return self.blocking(lambda client: self._run_all(client, requests))

    def blocking(self, work: Callable[[RolloutClient], Awaitable[T]]) -> T:
        """Run a coroutine with a client from blocking code, even inside a running event loop."""

        async def main() -> T:
            async with RolloutClient(self.url, self.key, patience_seconds=self.patience_seconds) as client:
                return await work(client)

        with start_blocking_portal() as portal:
            return portal.call(main)

    async def _run_all(self, client: RolloutClient, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        done = {}
        async for rollout in client.run_all(requests, concurrency=self.concurrency):
            done[rollout.rollout_id] = rollout
        return [done[str(request.rollout_id)] for request in requests]
