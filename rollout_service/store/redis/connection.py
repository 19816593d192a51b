"""The connection of a store to its Redis: a thread that sends the calls that wait together, as one pipeline.

Guarantees:
- Calls take effect in the order in which they were made, each as a whole or not at all.
- An answer is passed on only after Redis gave it, which a durable Redis does after its disk; that of a write, after as
  many replicas have it as the settings demand.
- A call that fails because the connection was lost may still have taken effect: callers repeat idempotent calls.
- After a lost connection, Redis is checked again before it is used; a library that it has lost is loaded again.
- The event loop never waits for Redis.
- If the thread itself fails, every caller gets an error, and `failed` raises it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import anyio
import redis

from rollout_service.base.errors import DefectError, ServiceError, StoreError
from rollout_service.store.jobs import JobResult, commit_times
from rollout_service.store.redis import checks
from rollout_service.store.redis.config import RedisConfig
from rollout_service.store.redis.health import RedisHealth
from rollout_service.store.redis.library import LIBRARY_NAMES, function_library, library_name
from rollout_service.store.redis.problems import (
    breaks_connection,
    explain,
    is_unknown_function,
    too_few_replicas,
)
from rollout_service.store.redis.reader import EventReader

MAX_BATCH = 256
"""The most calls in one pipeline, so that the first does not wait for too many others."""

REPLICA_SECONDS = 2.0
"""How long replicas may take to have a write."""

Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class _RedisJob:
    command: tuple[Any, ...]
    future: asyncio.Future[Any]
    writes: bool


class RedisConnection:
    """A store's connection, from `open` to `close`.

    `call` runs a function that writes, `read` one that does not, and `command` any other command that does not.
    `events` passes on the events of all services. Answers are those of redis-py: texts are bytes.
    """

    def __init__(self, config: RedisConfig, *, clock: Callable[[], float] | None = None) -> None:
        self.config = config
        self._clock = clock
        self._library = function_library()
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_RedisJob | None] = SimpleQueue()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._work, name="store-redis", daemon=True)
        self._client: redis.Redis | None = None
        self._was_connected = False
        self._closed = False
        self._died = anyio.Event()
        self._failure: StoreError | None = None
        self.reconnects = 0
        """How often it has connected again: the Redis there may then be another, which lacks the last writes."""
        self.commit_seconds = commit_times()
        self.health = RedisHealth(config.address)
        self._identity = checks.StoreIdentity()
        self.events = EventReader(config, self._library, self._identity, self.health, self._die)

    @classmethod
    async def open(cls, config: RedisConfig, *, clock: Callable[[], float] | None = None) -> RedisConnection:
        """Connect to a Redis and check it; `clock` returns Unix seconds, and Redis's own clock is used without it.

        Raises:
            StoreError: The Redis does not answer, or must not be used.
            ConfigurationError: The address or the password file is wrong.
        """
        config.check()
        connection = cls(config, clock=clock)
        connection._thread.start()
        try:
            with anyio.CancelScope(shield=True):
                await connection._opened
                await connection.events.start()
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def problem(self) -> StoreError | None:
        """Why the Redis cannot be used at the moment; None if no reason is known."""
        return self._failure or self.health.problem

    @property
    def errors(self) -> int:
        """The number of failed calls."""
        return self.health.errors

    def size_bytes(self) -> int:
        """Return the memory that Redis uses for all its data, as of a few seconds ago."""
        return self.events.used_memory

    async def failed(self) -> None:
        """Wait until a thread fails, which only a defect can cause.

        Raises:
            StoreError: A thread has failed.
        """
        await self._died.wait()
        raise self._failure or StoreError("the store failed")

    async def call(self, function: str, *arguments: Argument) -> Any:
        """Run a function that writes, and return its answer; cancelling the caller does not stop it.

        Raises:
            StoreError: Redis does not answer or refuses, or the store is closed. Whether the function has run is
                unknown if the connection was lost.
            DefectError: The function is wrong.
        """
        return await self._run(self._function(function, arguments), writes=True)

    async def read(self, function: str, *arguments: Argument) -> Any:
        """Run a function that only reads, and return its answer.

        Raises:
            StoreError: Redis does not answer or refuses, or the store is closed.
            DefectError: The function is wrong.
        """
        return await self._run(self._function(function, arguments), writes=False)

    async def command(self, *command: Argument) -> Any:
        """Run a command that only reads, and return its answer; `key` has the full names of keys.

        Raises:
            StoreError: Redis does not answer or refuses, or the store is closed.
            DefectError: The command is wrong.
        """
        return await self._run(command, writes=False)

    @property
    def library_name(self) -> str:
        """The name of the library with the functions of this release."""
        return self._library.name

    async def libraries(self) -> set[str]:
        """Return the names of the libraries of other releases in this Redis.

        Raises:
            StoreError: Redis does not answer or refuses, or the store is closed.
        """
        found = await self.command("FUNCTION LIST", "LIBRARYNAME", LIBRARY_NAMES)
        return {library_name(each) for each in found} - {self._library.name}

    async def delete_library(self, name: str) -> None:
        """Delete a library, if it is there.

        Raises:
            StoreError: Redis does not answer or refuses, or the store is closed.
        """
        try:
            await self._run(("FUNCTION DELETE", name), writes=True)
        except DefectError as error:
            if "not found" not in str(error):  # another service was faster
                raise

    def key(self, name: str) -> str:
        """Return the full name of a key of this store."""
        return f"{self.config.root}:{name}"

    @property
    def root(self) -> str:
        """The prefix of all keys of this store, without the colon that follows it."""
        return self.config.root

    async def close(self) -> None:
        """Run the remaining calls, disconnect and end the threads; idempotent."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        with anyio.CancelScope(shield=True):
            await self.events.close()
            await anyio.to_thread.run_sync(self._thread.join)

    def _function(self, name: str, arguments: Sequence[Argument]) -> tuple[Any, ...]:
        now = self._clock() if self._clock is not None else None
        return checks.call_arguments(self.config, self._library, name, now, *arguments)

    async def _run(self, command: tuple[Any, ...], *, writes: bool) -> Any:
        if self._died.is_set():
            raise self._failure or StoreError("the store failed")
        if self._closed:
            raise StoreError(
                "the store is closed", hint="The service is shutting down; try again after its restart."
            )
        future: asyncio.Future[Any] = self._loop.create_future()
        self._jobs.put(_RedisJob(command, future, writes))
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    # -- the thread --------------------------------------------------------------

    def _work(self) -> None:
        try:
            checks.warn_of_failover(self._connect(), self.config)
        except Exception as error:  # noqa: BLE001 - it is the caller's of `open`
            self._post(self._opened.set_exception, self._explained(error))
            return
        self._post(self._opened.set_result, None)
        batch: list[_RedisJob] = []
        try:
            while batch := self._next_batch():
                self._post(self._deliver, self._run_batch(batch))
        except BaseException as error:  # noqa: BLE001 - nobody sees a thread end
            self._post(self._die, error, batch)
        finally:
            self._disconnect()

    def _next_batch(self) -> list[_RedisJob]:
        """Return the waiting calls, at least one; an empty list ends the thread."""
        batch: list[_RedisJob] = []
        job = self._jobs.get()
        while job is not None:
            batch.append(job)
            if len(batch) == MAX_BATCH:
                return batch
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return batch
        if batch:
            self._jobs.put(None)  # the end comes after this batch
        return batch

    def _run_batch(self, batch: list[_RedisJob]) -> list[JobResult[_RedisJob]]:
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
        lost = [n for n, answer in enumerate(answers) if is_unknown_function(answer)]
        if lost:
            checks.load(self._connect(), self._library)
            again = self._pipeline([batch[n] for n in lost])
            for n, answer in zip(lost, again, strict=True):
                answers[n] = answer
        return answers

    def _pipeline(self, batch: list[_RedisJob]) -> list[Any]:
        pipeline = self._connect().pipeline(transaction=False)
        for job in batch:
            checks.execute(pipeline, *job.command)
        waits = self.config.replicas > 0 and any(job.writes for job in batch)
        if waits:
            checks.execute(pipeline, "WAIT", self.config.replicas, int(REPLICA_SECONDS * 1_000))
        answers: list[Any] = pipeline.execute(raise_on_error=False)
        if waits and (few := too_few_replicas(answers.pop(), self.config)) is not None:
            return [few if job.writes else answer for job, answer in zip(batch, answers, strict=True)]
        return answers

    def _answer(self, job: _RedisJob, answer: Any) -> JobResult[_RedisJob]:
        if isinstance(answer, Exception):
            return JobResult(job, error=self._explained(answer))
        return JobResult(job, value=answer)

    def _connect(self) -> redis.Redis:
        if self._client is None:
            self._client = checks.connect(self.config, self._library, self._identity)
            if self._was_connected:
                self._post(self._connected_again)
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
        self.events.look_anew()

    def _die(self, error: BaseException, batch: Sequence[_RedisJob] = ()) -> None:
        """Fail everyone who waits."""
        self._failure = StoreError(
            f"a thread of the store failed: {type(error).__name__}: {error}", hint="Restart the service."
        )
        self._died.set()
        left = list(batch)
        while not self._jobs.empty():
            left += [job for job in [self._jobs.get_nowait()] if job is not None]
        self._jobs.put(None)
        for job in left:
            JobResult(job, error=self._failure).deliver()

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop, unless the loop is closed and nobody waits."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def _as_store_error(error: ServiceError) -> StoreError:
    return error if isinstance(error, StoreError) else StoreError(str(error), hint=error.hint)
