"""One shard of a store, and whether it answers; and questions to several at once.

A shard that does not answer keeps nobody waiting for longer than `AWAY_SECONDS` and a moment, though a call to it
cannot be cut short; it is asked nothing until it answers again. What it answered too late is not lost unnoticed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Generic, TypeVar, cast

import anyio
from anyio.abc import TaskGroup

from rollout_service.base.errors import StoreError
from rollout_service.base.signals import ChangeSignal, first_of
from rollout_service.store.redis.store import RedisStore

AWAY_SECONDS = 2.0
"""The silence after which a shard is away: well before it makes this node look dead to the others."""
PROBE_SECONDS = 1.0
REST_SECONDS = 1.0
"""How long to leave a shard alone after it refused a claim."""
_GRACE_SECONDS = 0.05

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@dataclass(slots=True)
class _ShardCall(Generic[T]):
    call: Callable[[], Awaitable[T]]
    late: Callable[[T], None] | None = None
    answered: anyio.Event = field(default_factory=anyio.Event)
    answers: list[T] = field(default_factory=list)
    error: Exception | None = None
    is_abandoned: bool = False

    async def ask(self) -> None:
        try:
            self.answers.append(await self.call())
        except Exception as error:  # noqa: BLE001 - it is the caller's
            self.error = error
        finally:
            self.answered.set()  # also when the store closes: who waits cannot be cancelled
        if self.is_abandoned and self.late is not None:
            for answer in self.answers:
                self.late(answer)


class Shard:
    def __init__(self, number: int, store: RedisStore, tasks: TaskGroup) -> None:
        """`tasks` has the calls that a shard does not answer in time."""
        self.number = number
        self.store = store
        self.away: StoreError | None = None
        """Why it does not answer."""
        self.claimed_for: object = None
        """The kind of the last claim there."""
        self._tasks = tasks
        self._changed = ChangeSignal()
        self._rests_until = 0.0
        self._owed: Callable[[], Awaitable[object]] | None = None

    @property
    def problem(self) -> StoreError | None:
        return self.away or self.store.problem

    @property
    def present(self) -> RedisStore:
        """
        Raises:
            StoreError: The shard is away.
        """
        self._check()
        return self.store

    def _check(self) -> None:
        if self.away is not None:
            raise self.away

    async def ask(self, call: Callable[[], Awaitable[T]], late: Callable[[T], None] | None = None) -> T:
        """Return the answer, whether or not the caller is cancelled meanwhile.

        Raises:
            StoreError: The shard fails, or is away. The call may still take effect; `late` then gets its answer.
        """
        self._check()
        asked = _ShardCall(call, late)
        self._tasks.start_soon(asked.ask)
        with anyio.CancelScope(shield=True):
            await first_of(asked.answered.wait, self._until_away)
        if asked.error is not None:
            raise asked.error
        if not asked.answers:
            asked.is_abandoned = True
            raise self.away or self._silent()  # it may be back already
        return asked.answers[0]

    def rest(self) -> None:
        self._rests_until = anyio.current_time() + REST_SECONDS

    async def usable(self) -> None:
        """Wait until it answers, and has rested."""
        while True:
            if self.away is not None:
                await self._changed.wait()
            elif (left := self._rests_until - anyio.current_time()) > 0:
                await anyio.sleep(left)
            else:
                return

    def owe(self, call: Callable[[], Awaitable[object]]) -> None:
        """Call once the shard answers again, in place of what was owed before."""
        self._owed = call

    async def watch(self) -> None:
        while True:
            asked = _ShardCall(self.store.last_event)
            self._tasks.start_soon(asked.ask)
            with anyio.move_on_after(AWAY_SECONDS):
                await asked.answered.wait()
            await anyio.sleep(0 if asked.answered.is_set() else _GRACE_SECONDS)  # a busy loop is not its fault
            if not asked.answered.is_set():
                self._set(self._silent())
                await asked.answered.wait()
            self._set(asked.error if isinstance(asked.error, StoreError) else None)
            if self.away is None and self._owed is not None:
                owed, self._owed = _ShardCall(self._owed), None
                self._tasks.start_soon(owed.ask)
            await anyio.sleep(PROBE_SECONDS)

    def _silent(self) -> StoreError:
        address = self.store.connection.config.address
        return StoreError(f"the Redis at {address} does not answer", hint="Look at its host.")

    def _set(self, away: StoreError | None) -> None:
        was, self.away = self.away, away
        if (was is None) is not (away is None):
            self._changed.notify()

    async def _until_away(self) -> None:
        while self.away is None:
            await self._changed.wait()


@dataclass(slots=True)
class ShardAnswers(Generic[T]):
    """The answers of shards, by their numbers, and why the others gave none."""

    found: dict[int, T] = field(default_factory=dict)
    failures: dict[int, StoreError] = field(default_factory=dict)

    def some(self) -> Sequence[T]:
        """Return answers in the order of the shards.

        Raises:
            StoreError: Every shard that was asked failed.
        """
        if self.failures and not self.found:
            raise next(iter(self.failures.values()))
        return [self.found[number] for number in sorted(self.found)]

    def whole(self) -> Sequence[T]:
        """Return answers in the order of the shards.

        Raises:
            StoreError: A shard failed.
        """
        for failure in self.failures.values():
            raise failure
        return self.some()


async def ask_each(shards: Iterable[Shard], call: Callable[[Shard], Awaitable[T]]) -> ShardAnswers[T]:
    """Ask shards at once, and wait until each has answered, failed or gone away.

    Errors other than a StoreError, such as that of a wrong request, are the caller's.
    """
    answers = ShardAnswers[T]()
    wrong: list[Exception] = []

    async def one(shard: Shard) -> None:
        try:
            answers.found[shard.number] = await shard.ask(partial(call, shard))
        except StoreError as error:
            answers.failures[shard.number] = error
        except Exception as error:  # noqa: BLE001 - raised below, and not in a group
            wrong.append(error)

    async with anyio.create_task_group() as tasks:
        for shard in shards:
            tasks.start_soon(one, shard)
    for error in wrong:
        raise error
    return answers


def divided(items: Iterable[T], shard_of: Callable[[T], int]) -> Mapping[int, list[T]]:
    found: defaultdict[int, list[T]] = defaultdict(list)
    for item in items:
        found[shard_of(item)].append(item)
    return found


def in_its_shard(method: F, name: Callable[[Any], str] = str) -> F:
    """Return a method that the shard of its first argument carries out.

    `name` returns the id of the run or rollout; the class has `at_shard_of` for it.
    """

    @wraps(method)
    def call(self: Any, of: Any, *arguments: Any, **options: Any) -> Any:
        return getattr(self.at_shard_of(name(of)), method.__name__)(of, *arguments, **options)

    return cast(F, call)
