"""The store of many nodes, spread over several Redis.

Beyond the contract: a rollout is in the shard of its run, whose id its own begins with, or of its own id, so any node
finds it without asking. A claim goes to the shards that have news, in turns. The first shard, the home, also has what
concerns all nodes: the engines with the commands to their pools, and the commands to nodes. While it is away these
wait, and its own runs; the runs of other shards go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b

import anyio
from prometheus_client import Histogram
from pydantic import JsonValue

from api_schemas.events import Event
from api_schemas.rollouts import RolloutPage, RolloutState
from api_schemas.views.summaries import SummaryFilter, SummaryOrder, SummaryPage
from rollout_service.base.errors import StoreError
from rollout_service.base.signals import first_of
from rollout_service.store.codec.summaries import count_states
from rollout_service.store.contract import EncodedSteps, Lease, Store, UnsavedTurn
from rollout_service.store.jobs import commit_histogram
from rollout_service.store.redis.config import RedisConfig
from rollout_service.store.redis.store import RedisEngines, RedisStore
from rollout_service.store.segments import SegmentFiles
from rollout_service.store.sharded.cluster import ShardedCluster
from rollout_service.store.sharded.pages import merged_page
from rollout_service.store.sharded.runs import ShardedRuns
from rollout_service.store.sharded.shard import Shard, ask_each, divided, in_its_shard

Take = Callable[[Shard, int], Awaitable[list[Lease]]]
"""Claims up to so many rollouts of a shard."""


def shard_of(name: str, shards: int) -> int:
    """Return the number of a run's shard, or of a rollout's, whose id begins with that of its run and a dot."""
    digest = blake2b(name.partition(".")[0].encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


def _rollout_of(lease: Lease) -> str:
    return lease.rollout_id


class ShardedStore(Store):
    """The store over several shards: `async with ShardedStore.opened(configs, ...) as store:`."""

    def __init__(self, shards: Sequence[Shard], commit_seconds: Histogram) -> None:
        self._shards = shards
        self._home = shards[0].store
        self._commit_seconds = commit_seconds
        self._cluster = ShardedCluster(shards)
        self._runs = ShardedRuns(shards, self.shard_of)
        self._woken: set[int] | None = None
        """Shards that may have work, as the last wait found; None if there was no wait since the last claim."""
        self._turn = 0
        self._strays = 0
        """Rollouts that claims leased whose answers came too late."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        configs: Sequence[RedisConfig],
        *,
        is_gone: Callable[[str], bool],
        clock: Callable[[], float] | None = None,
        files: Sequence[SegmentFiles | None] = (),
        owner: str = "",
    ) -> AsyncIterator[ShardedStore]:
        """Open the shards; `files` has the place of each, and the rest is that of `RedisStore.open`.

        Raises:
            StoreError: The home does not answer, or a Redis cannot be used, or belongs to another store.
            ConfigurationError: An address, the password file or a place cannot be used.
        """
        commit_seconds, home = commit_histogram(), ""
        async with AsyncExitStack() as stack:
            stores: list[RedisStore] = []
            for config, place in zip(configs, files or [None] * len(configs), strict=True):
                opening = RedisStore.open(
                    replace(config, home=home),
                    is_gone=is_gone,
                    clock=clock,
                    files=place,
                    owner=owner,
                    commit_seconds=commit_seconds,
                    may_be_away=bool(stores),
                )
                stores.append(await stack.enter_async_context(await opening))
                home = home or stores[0].connection.store_id
            tasks = await stack.enter_async_context(anyio.create_task_group())
            shards = [Shard(number, store, tasks) for number, store in enumerate(stores)]
            for shard in shards:
                tasks.start_soon(shard.watch)
            yield cls(shards, commit_seconds)
            tasks.cancel_scope.cancel()

    @property
    def shards(self) -> Sequence[RedisStore]:
        return [shard.store for shard in self._shards]

    def shard_of(self, name: str) -> int:
        return shard_of(name, len(self._shards))

    @property
    def failing(self) -> Mapping[int, StoreError]:
        return {shard.number: problem for shard in self._shards if (problem := shard.problem) is not None}

    @property
    def problem(self) -> StoreError | None:
        failing = self.failing
        return failing[0] if len(failing) == len(self._shards) else None

    @property
    def errors(self) -> int:
        return sum(shard.store.errors for shard in self._shards)

    def size_bytes(self) -> int:
        return sum(shard.store.size_bytes() for shard in self._shards)

    @property
    def commit_seconds(self) -> Histogram:
        return self._commit_seconds

    @property
    def rewinds(self) -> int:
        return self._cluster.rejoined + self._strays + sum(shard.store.rewinds for shard in self._shards)

    @property
    def runs(self) -> ShardedRuns:
        return self._runs

    @property
    def engines(self) -> RedisEngines:
        return self._home.engines

    @property
    def cluster(self) -> ShardedCluster:
        return self._cluster

    async def close(self) -> None:
        for shard in self._shards:
            await shard.store.close()

    def at_shard_of(self, rollout_id: str) -> RedisStore:
        return self._shards[self.shard_of(rollout_id)].present

    submit = in_its_shard(Store.submit, lambda request: request.rollout_id or "")
    advance = in_its_shard(Store.advance, _rollout_of)
    retry = in_its_shard(Store.retry, _rollout_of)
    restart = in_its_shard(Store.restart, _rollout_of)
    finish = in_its_shard(Store.finish, _rollout_of)
    cancel = in_its_shard(Store.cancel)
    get = in_its_shard(Store.get)
    trajectory = in_its_shard(Store.trajectory)
    tree = in_its_shard(Store.tree)
    saved_turns = in_its_shard(Store.saved_turns)
    wait_for_result = in_its_shard(Store.wait_for_result)

    async def save_turns(self, owner: str, turns: Sequence[UnsavedTurn]) -> int:
        parts = divided(turns, lambda turn: self.shard_of(turn.rollout_id))
        return sum([await self.shards[number].save_turns(owner, some) for number, some in parts.items()])

    async def save_steps(self, attempts: Sequence[EncodedSteps]) -> int:
        parts = divided(attempts, lambda attempt: self.shard_of(attempt.rollout_id))
        return sum([await self.shards[number].save_steps(some) for number, some in parts.items()])

    async def saved_steps(self, rollout_ids: Sequence[str]) -> Mapping[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        for number, some in divided(rollout_ids, self.shard_of).items():
            found |= await self.shards[number].saved_steps(some)
        return found

    async def renew(self, owner: str, rollout_ids: Sequence[str], *, lease_seconds: float) -> list[str]:
        parts = divided(rollout_ids, self.shard_of)

        async def renew(shard: Shard) -> list[str]:
            return await shard.store.renew(owner, parts[shard.number], lease_seconds=lease_seconds)

        answers = await ask_each([self._shards[number] for number in parts], renew)
        for number in answers.failures:  # the rest is renewed in time, and these as soon as they can be
            self._shards[number].owe(partial(renew, self._shards[number]))
        return sorted(name for lost in answers.some() for name in lost)

    async def release(self, owner: str, rollout_ids: Sequence[str] | None = None) -> int:
        if rollout_ids is None:
            return sum((await ask_each(self._shards, lambda shard: shard.store.release(owner))).whole())
        parts = divided(rollout_ids, self.shard_of)
        asked = [self._shards[number] for number in parts]
        answers = await ask_each(asked, lambda shard: shard.store.release(owner, parts[shard.number]))
        return sum(answers.whole())

    async def recover(self, owner: str) -> int:
        return sum((await ask_each(self._shards, lambda shard: shard.store.recover(owner))).some())

    async def held(self, owner: str, *, believed: Mapping[str, int] | None = None) -> Mapping[str, int]:
        answers = await ask_each(self._shards, lambda shard: shard.store.held(owner))
        unknown = (name for name in believed or () if self.shard_of(name) in answers.failures)
        found = {name: (believed or {})[name] for name in unknown}
        for held in answers.some():
            found |= held
        return found

    async def claim(
        self,
        owner: str,
        *,
        limit: int,
        lease_seconds: float,
        pools: Collection[str] | None = None,
        waits: Mapping[str, float] | None = None,
    ) -> list[Lease]:
        wanted = (owner, None if pools is None else sorted(pools), None if waits is None else dict(waits))
        woken, self._woken = self._woken, None
        self._turn += 1
        turns = [self._shards[(self._turn + n) % len(self._shards)] for n in range(len(self._shards))]
        first = [one for one in turns if woken is None or one.number in woken or one.claimed_for != wanted]
        others = [one for one in turns if one not in first]

        async def take(shard: Shard, share: int) -> list[Lease]:
            async def claim() -> list[Lease]:
                return await shard.store.claim(
                    owner, limit=share, lease_seconds=lease_seconds, pools=pools, waits=waits
                )

            leases = await shard.ask(claim, late=self._note_strays)
            shard.claimed_for = wanted
            return leases

        failures: list[StoreError] = []
        leases = await _take_in_turns(first, limit, take, failures)
        leases = leases or await _take_in_turns(others, limit, take, failures)
        if not leases and len(failures) >= len(self._shards):
            raise failures[0]
        return sorted(leases, key=lambda lease: lease.created_at)

    def _note_strays(self, leases: Sequence[Lease]) -> None:
        self._strays += len(leases)  # so the owner compares what it holds with what it works on

    async def wait_for_work(self) -> None:
        await self._wait_for_any(lambda store: store.wait_for_work())
        self._woken = {shard.number for shard in self._shards if shard.store.may_have_work}

    async def cancel_requested(self, owner: str) -> list[str]:
        answers = await ask_each(self._shards, lambda shard: shard.store.cancel_requested(owner))
        for number in answers.failures:
            self._shards[number].rest()
        return sorted(name for requested in answers.some() for name in requested)

    async def wait_for_cancels(self) -> None:
        await self._wait_for_any(lambda store: store.wait_for_cancels())

    async def _wait_for_any(self, wait: Callable[[RedisStore], Awaitable[None]]) -> None:
        async def usable(shard: Shard) -> None:
            await shard.usable()
            await wait(shard.store)

        await first_of(*(partial(usable, shard) for shard in self._shards))

    async def counts(self) -> dict[RolloutState, int]:
        answers = await ask_each(self._shards, lambda shard: shard.store.counts())
        counts = Counter[RolloutState]()
        for some in answers.some():
            counts.update(some)
        return dict(counts)

    async def list(
        self, *, state: RolloutState | None = None, cursor: str | None = None, limit: int = 100
    ) -> RolloutPage:
        async def fetch(shard: Shard, after: str | None, most: int) -> RolloutPage:
            return await shard.store.list(state=state, cursor=after, limit=most)

        rows, after = await merged_page(self._shards, fetch, lambda page: page.rollouts, cursor, limit)
        return RolloutPage(rollouts=rows, next_cursor=after, counts=await self.counts())

    async def summaries(
        self,
        which: SummaryFilter,
        *,
        order: SummaryOrder = "newest",
        cursor: str | None = None,
        limit: int = 100,
    ) -> SummaryPage:
        async def fetch(shard: Shard, after: str | None, most: int) -> SummaryPage:
            return await shard.store.summaries(which, order=order, cursor=after, limit=most)

        if which.run is not None:
            return await self.at_shard_of(which.run).summaries(which, order=order, cursor=cursor, limit=limit)
        rows, after = await merged_page(
            self._shards, fetch, lambda page: page.rows, cursor, limit, newest=order == "newest"
        )
        counts = await self.counts() if which.only_states else None
        return SummaryPage(
            rows=rows,
            next_cursor=after,
            matching=None if counts is None else count_states(counts, which.states),
        )

    async def record(self, kind: str, subject: str, data: dict[str, JsonValue]) -> Event:
        shard = self._shards[self.shard_of(subject)]
        return await shard.ask(partial(shard.store.record, kind, subject, data))


async def _take_in_turns(shards: Sequence[Shard], limit: int, take: Take, failures: list[StoreError]) -> list[Lease]:
    """Claim from shards in this order: an equal share of each, then what is left of those that had as much.

    The errors of those that fail are added to `failures`.
    """
    leases: list[Lease] = []

    async def claim(shard: Shard, share: int) -> bool:
        try:
            found = await take(shard, share)
        except StoreError as error:
            failures.append(error)
            shard.rest()
            return False
        leases.extend(found)
        return len(found) >= share

    full: list[Shard] = []
    for index, shard in enumerate(shards):
        share = -(-(limit - len(leases)) // (len(shards) - index))
        if share > 0 and await claim(shard, share):
            full.append(shard)
    for shard in full:
        if len(leases) < limit:
            await claim(shard, limit - len(leases))
    return leases
