"""The connection of a store to its Redis: a thread that sends the calls that wait together, as one pipeline.

- Calls take effect in the order in which they were made, each as a whole or not at all.
- An answer is passed on only after Redis gave it, which a durable Redis does after its disk; that of a write, after as
  many replicas have it as the settings demand.
- A call that fails because the connection was lost may still have taken effect: callers repeat idempotent calls.
- After a lost connection, Redis is checked again before it is used; a library that it has lost is loaded again.
- The event loop never waits for Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import redis
from prometheus_client import Histogram

from rollout_service.base.errors import DefectError, ServiceError, StoreError
from rollout_service.store.jobs import Job, JobResult, JobThread
from rollout_service.store.redis import checks
from rollout_service.store.redis.checks import LIBRARY_NAMES, function_library, library_name
from rollout_service.store.redis.config import RedisConfig
from rollout_service.store.redis.problems import breaks_connection, explain, is_away, too_few_replicas, was_not_run
from rollout_service.store.redis.topics import TopicReader

REPLICA_SECONDS = 2.0
"""How long replicas may take to have a write."""
LOOK_SECONDS = 10.0
"""How often to look at Redis's memory, and whether it still has the store."""

Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class _RedisJob(Job):
    command: tuple[Any, ...]


class RedisConnection(JobThread[_RedisJob]):
    """A store's connection, from `open` to `close`.

    `call` runs a function that writes, `read` one that does not, and `command` any other command that does not. Answers
    are those of redis-py: texts are bytes.

    Raises:
        StoreError: Redis does not answer or refuses, or the store is closed; every call can raise it. Whether a
            function has run is unknown if the connection was lost.
        DefectError: The function or the command is wrong; every call can raise it.
    """

    def __init__(
        self,
        config: RedisConfig,
        *,
        clock: Callable[[], float] | None = None,
        commit_seconds: Histogram | None = None,
        may_be_away: bool = False,
    ) -> None:
        super().__init__("store-redis", config.address, commit_seconds)
        self.config = config
        self._clock = clock
        self._client: redis.Redis | None = None
        self._was_connected = False
        self.reconnects = 0
        """How often it has connected again: the Redis may then be another, which lacks the last writes."""
        self._identity = checks.StoreIdentity()
        self.topics = TopicReader(config, self._identity, self.health, self._die)
        self._used_memory, self._looked_at = 0, -LOOK_SECONDS
        self._may_be_away = may_be_away

    @classmethod
    async def open(
        cls,
        config: RedisConfig,
        *,
        clock: Callable[[], float] | None = None,
        commit_seconds: Histogram | None = None,
        may_be_away: bool = False,
    ) -> RedisConnection:
        """Connect to a Redis and check it; `clock` returns Unix seconds, and Redis's own clock is used without it.

        Shards share one `commit_seconds`. A Redis that may be away is connected to as soon as it answers.

        Raises:
            StoreError: The Redis does not answer, or must not be used.
            ConfigurationError: The password file is wrong.
        """
        connection = cls(config, clock=clock, commit_seconds=commit_seconds, may_be_away=may_be_away)
        try:
            with anyio.CancelScope(shield=True):
                await connection.start()
                await connection.topics.start(may_be_away=may_be_away)
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def store_id(self) -> str:
        return self._identity.store or ""

    def size_bytes(self) -> int:
        """Return the memory of all of Redis's data, as of a few seconds ago."""
        return self._used_memory

    async def call(self, function: str, *arguments: Argument) -> Any:
        """Run a function that writes, and return its answer; cancelling the caller does not stop it."""
        return await self._run(self._function(function, arguments), writes=True)

    async def read(self, function: str, *arguments: Argument) -> Any:
        return await self._run(self._function(function, arguments), writes=False)

    async def command(self, *command: Argument) -> Any:
        """Run a command that only reads; `key` has the full names of keys."""
        return await self._run(command, writes=False)

    async def libraries(self) -> set[str]:
        """Return the libraries of other releases in this Redis."""
        found = await self.command("FUNCTION LIST", "LIBRARYNAME", LIBRARY_NAMES)
        return {library_name(each) for each in found} - {function_library().name}

    async def delete_library(self, name: str) -> None:
        try:
            await self._run(("FUNCTION DELETE", name), writes=True)
        except DefectError as error:
            if "not found" not in str(error):  # another service was faster
                raise

    def key(self, name: str) -> str:
        return f"{self.config.root}:{name}"

    async def close(self) -> None:
        """Run the remaining calls first; idempotent."""
        self._refuse()
        with anyio.CancelScope(shield=True):
            await self.topics.close()
            await super().close()

    def _function(self, name: str, arguments: Sequence[Argument]) -> tuple[Any, ...]:
        now = self._clock() if self._clock is not None else None
        return checks.call_arguments(self.config, name, now, *arguments)

    async def _run(self, command: tuple[Any, ...], *, writes: bool) -> Any:
        for part in command:
            if isinstance(part, str) and not part.isascii():
                part.encode()  # half of a surrogate pair fails this call, not the thread with all others
        return await self._submit(_RedisJob(command=command, writes=writes))

    # -- the thread --------------------------------------------------------------

    def _open(self) -> None:
        try:
            checks.warn_of_failover(self._connect(), self.config)
        except (redis.RedisError, OSError) as error:
            if not (self._may_be_away and is_away(error)):
                raise explain(error, self.config.address) from error

    def _run_batch(self, batch: list[_RedisJob]) -> None:
        self._call(self._deliver, self._answers(batch))

    def _answers(self, batch: list[_RedisJob]) -> list[JobResult[_RedisJob]]:
        started = time.perf_counter()
        try:
            answers = self._send(batch)
        except (redis.RedisError, OSError, ServiceError) as error:
            self._disconnect()
            return [JobResult(job, error=self._explained(error)) for job in batch]
        if any(isinstance(answer, Exception) and breaks_connection(answer) for answer in answers):
            self._disconnect()
        if any(job.writes for job in batch):
            self.commit_seconds.observe(time.perf_counter() - started)
        return [self._answer(job, answer) for job, answer in zip(batch, answers, strict=True)]

    def _send(self, batch: list[_RedisJob]) -> list[Any]:
        try:
            answers = self._pipeline(batch)
        except checks.ConnectionLostError:
            self._disconnect()
            answers = self._pipeline(batch)
        lost = [n for n, answer in enumerate(answers) if was_not_run(answer)]
        if lost:
            if any(isinstance(answers[n], redis.exceptions.MovedError) for n in lost):
                self._disconnect()
            checks.load(self._connect())
            again = self._pipeline([batch[n] for n in lost])
            for n, answer in zip(lost, again, strict=True):
                answers[n] = answer
        return answers

    def _pipeline(self, batch: list[_RedisJob]) -> list[Any]:
        client = self._connect()
        self._look(client)
        pipeline = client.pipeline(transaction=False)
        for job in batch:
            checks.execute(pipeline, *job.command)
        waits = self.config.replicas > 0 and any(job.writes for job in batch)
        if waits:
            checks.execute(pipeline, "WAIT", self.config.replicas, int(REPLICA_SECONDS * 1_000))
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        if waits and (few := too_few_replicas(answers.pop(), self.config)) is not None:
            return [few if job.writes else answer for job, answer in zip(batch, answers, strict=True)]
        return answers

    def _look(self, client: redis.Redis) -> None:
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._identity.check(checks.store_id(client, self.config), self.config)
            self._used_memory = int(checks.execute(client, "INFO", "memory")["used_memory"])
            self._looked_at = time.monotonic()

    def _answer(self, job: _RedisJob, answer: Any) -> JobResult[_RedisJob]:
        if isinstance(answer, Exception):
            return JobResult(job, error=self._explained(answer))
        return JobResult(job, value=answer)

    def _connect(self) -> redis.Redis:
        if self._client is None:
            self._client = checks.connect(self.config, self._identity)
            if self._was_connected:
                self._call(self._connected_again)
            self._was_connected = True
        return self._client

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, redis.RedisError | OSError):
            return explain(error, self.config.address)
        return error

    # -- on the event loop -------------------------------------------------------

    def _deliver(self, answers: list[JobResult[_RedisJob]]) -> None:
        for writes in (False, True):
            self._record([answer for answer in answers if answer.job.writes is writes], writes=writes)
        for answer in answers:
            answer.deliver()

    def _record(self, answers: list[JobResult[_RedisJob]], *, writes: bool) -> None:
        part = "writes" if writes else "reads"
        failures = [answer.error for answer in answers if isinstance(answer.error, ServiceError)]
        if failures:
            self.health.failed(part, _as_store_error(failures[0]), calls=len(failures))
        elif answers:
            self.health.succeeded(part)
            if writes:
                self.health.succeeded("reads")

    def _connected_again(self) -> None:
        self.reconnects += 1
        self.topics.look_anew()


def _as_store_error(error: ServiceError) -> StoreError:
    return error if isinstance(error, StoreError) else StoreError(str(error), hint=error.hint)
