"""Commands to pools whose backends several services share: one of the services carries each command out.

- Every backend gets a command once, from the service that leads the role `pool:NAME`; all others hold their requests
  meanwhile, and take over the pause, the weights and the process groups that the command left.
- A command outlives the service that was asked and the one that carries it out: another one repeats it, within
  `LEADER_SECONDS` and a heartbeat. Weights are then given only to backends that do not report their version.
- A node that does not confirm in time that it holds is named in the outcome; a dead one is not waited for.
- A backend that joins anywhere gets the pool's weights and pause first, by one service at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import anyio
import structlog
from anyio.abc import TaskGroup
from pydantic import BaseModel

from api_schemas.errors import ErrorInfo
from api_schemas.inference import BackendOutcome, PauseMode, PauseRequest, PoolOutcome, WeightsRequest
from api_schemas.nodes import NodeState
from rollout_service.base.errors import ServiceError, StoreError, describe
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.errors import InferenceError
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.weights.outcomes import OUT_OF_SERVICE
from rollout_service.engines.pool.weights.state import PoolState
from rollout_service.engines.serving.orders import (
    REQUESTS,
    LocalCommands,
    PoolCommands,
    PoolRequest,
    refuse_weights_of_frozen,
)
from rollout_service.store.cluster_contract import DEAD_SECONDS, HEARTBEAT_SECONDS, ClusterStore
from rollout_service.store.engines_contract import EnginesStore, PoolRecord
from rollout_service.store.retrying import retry_until_stored
from sandboxes.task_groups import open_task_group

T = TypeVar("T")
log = structlog.get_logger(__name__)

HOLD_SECONDS = 5.0
"""How long a command waits for nodes to hold their requests; a healthy one confirms within milliseconds."""
_ROLE_RETRY_SECONDS = 0.1
_RESIGN_SECONDS = 1.0
_OTHERS_FIRST_SECONDS = 2.0
"""How long a node that lacks a backend of the pool leaves a command to nodes that have them all."""
_KINDS = {request: kind for kind, request in REQUESTS.items()}


class CommandResult(BaseModel):
    outcome: PoolOutcome | None = None
    error: ErrorInfo | None = None
    context: dict[str, Any] = {}


class SharedCommands(PoolCommands):
    """The commands to pools that services share; call `attach` before anything else."""

    def __init__(self, store: EnginesStore, cluster: ClusterStore, owner: str) -> None:
        self._store = store
        self._cluster = cluster
        self._owner = owner
        self._records: dict[str, PoolRecord] = {}
        self._taken_over: dict[str, int] = {}
        """The revision of each pool's state that this service has taken over, or brought about."""
        self._attended: set[tuple[str, int]] = set()
        self._locks: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._changed = ChangeSignal()

    def attach(self, pools: Pools) -> None:
        """Set the pools, which need `exclusive` when they are made."""
        self._pools = pools
        self._local = LocalCommands(pools)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the commands of all services, and carry out those that this one leads."""
        async with anyio.create_task_group() as tasks:
            await self._look(tasks)
            tasks.start_soon(self._follow, tasks)
            yield
            tasks.cancel_scope.cancel()

    async def run(self, request: PoolRequest) -> PoolOutcome:
        refuse_weights_of_frozen(request)  # before any node holds its requests for it
        kind, pool = _KINDS[type(request)], request.pool
        if all(each.spec.pool != pool for each in await self._store.backends()):
            return await self._local.run(request)
        ask = partial(self._store.ask, pool, kind, request.model_dump_json())
        number = await self._until(ask)
        result = CommandResult.model_validate_json(await self._until(partial(self._store.result, pool, number)))
        if result.outcome is not None:
            return result.outcome
        raise _error(result)

    async def _until(self, ask: Callable[[], Awaitable[T | None]]) -> T:
        """Ask again after each change until there is an answer."""
        while True:
            changed = self._changed.next
            if (answer := await ask()) is not None:
                return answer
            await changed.wait()

    async def _follow(self, tasks: TaskGroup) -> None:
        seen = 0
        while True:
            seen = await self._store.wait_for_change(seen)
            await self._look(tasks)

    async def _look(self, tasks: TaskGroup) -> None:
        for record in await retry_until_stored("read the commands to pools", self._store.pools):
            self._records[record.pool] = record
            command = (record.pool, record.number)
            if not record.is_open:
                self._take_over(record)
            elif command not in self._attended:
                self._attended.add(command)
                tasks.start_soon(self._attend, record)
        self._changed.notify()

    def _take_over(self, record: PoolRecord) -> None:
        pool = self._pools.get(record.pool)
        if pool is None or record.revision <= self._taken_over.get(record.pool, 0):
            return
        self._taken_over[record.pool] = record.revision
        pool.controller.take_over(_state(record))

    async def _attend(self, record: PoolRecord) -> None:
        """Hold this node's requests, and carry the command out unless another service does."""
        try:
            request = REQUESTS[record.kind].model_validate_json(record.request)
            await self._hold(record, request)
            await anyio.sleep(_OTHERS_FIRST_SECONDS if await self._missing(record.pool) else 0.0)
            while self._is_open(record):
                changed = self._changed.next
                if not await self._carry_out_if_leader(record, request):
                    with anyio.move_on_after(HEARTBEAT_SECONDS):
                        await changed.wait()
        finally:
            self._attended.discard((record.pool, record.number))

    def _is_open(self, record: PoolRecord) -> bool:
        now = self._records[record.pool]
        return now.is_open and now.number == record.number

    async def _hold(self, record: PoolRecord, request: PoolRequest) -> None:
        if not isinstance(request, PauseRequest | WeightsRequest):
            return
        if (pool := self._pools.get(record.pool)) is not None:
            pool.controller.hold(request.mode)
            if request.mode is PauseMode.DRAIN:
                await pool.controller.drained(request.drain_seconds)
        hold = partial(self._store.hold, record.pool, record.number, self._owner)
        await retry_until_stored("confirm that requests are held", hold)

    async def _missing(self, pool: str) -> list[str]:
        """Return the backends that this node does not have."""
        known = self._pools.get(pool)
        shared = await retry_until_stored("read the backends", self._store.backends)
        ids = [each.backend_id for each in shared if each.spec.pool == pool]
        return [each for each in ids if known is None or each not in known]

    async def _carry_out_if_leader(self, record: PoolRecord, request: PoolRequest) -> bool:
        async with self._locks[record.pool]:
            try:
                if await self._cluster.lead(_role(record.pool), self._owner) is None:
                    return False
            except StoreError:
                return False
            async with self._leading(record.pool):
                await self._look_at(record.pool)
                if self._is_open(record):
                    await self._carry_out(self._records[record.pool], request)
        return True

    async def _look_at(self, pool: str) -> None:
        for record in await retry_until_stored("read the commands to pools", self._store.pools):
            if record.pool == pool:
                self._records[pool] = record

    async def _carry_out(self, record: PoolRecord, request: PoolRequest) -> None:
        late = await self._wait_for_holds(record, request)
        is_first = await retry_until_stored("begin a command", partial(self._store.begin, record.pool, record.number))
        pool = self._pools.get(record.pool)
        if pool is not None:
            pool.controller.take_over(_state(record))
        result = await self._answer(request, is_repeated=not is_first)
        if result.outcome is not None:
            result.outcome = await self._complete(result.outcome, late)
        state = record.state if pool is None else (await self._state_after(record.pool)).model_dump_json()
        finish = partial(self._store.finish, record.pool, record.number, result.model_dump_json(), state)
        if await retry_until_stored("end a command", finish):
            self._taken_over[record.pool] = record.revision + 1
        await self._look_at(record.pool)
        self._take_over(self._records[record.pool])

    async def _state_after(self, name: str) -> PoolState:
        """Return the state for the other services; a backend that missed a command is out until it gets it."""
        state = self._pools[name].controller.state()
        return state.model_copy(update={"out": [*state.out, *await self._missing(name)]})

    async def _answer(self, request: PoolRequest, *, is_repeated: bool) -> CommandResult:
        try:
            return CommandResult(outcome=await self._local.run(request, is_repeated=is_repeated))
        except Exception as error:
            info = describe(error)
            defect = error if info.code == "internal_error" else None
            log.warning("command to a pool refused", pool=request.pool, error=info.message, exc_info=defect)
            context = error.context if isinstance(error, ServiceError) else {}
            return CommandResult(error=info, context=context)

    async def _complete(self, outcome: PoolOutcome, late: list[str]) -> PoolOutcome:
        """Add the backends that only other nodes have, and the nodes that did not hold in time."""
        told = {each.backend_id for each in outcome.outcomes}
        absent = [
            BackendOutcome(
                backend_id=each,
                ok=False,
                seconds=0.0,
                error="cannot be reached from the node that carried the command out",
                code=OUT_OF_SERVICE,
            )
            for each in await self._missing(outcome.pool)
            if each not in told
        ]
        update = {"outcomes": [*outcome.outcomes, *absent], "nodes_not_held": late}
        return outcome.model_copy(update=update)

    async def _wait_for_holds(self, record: PoolRecord, request: PoolRequest) -> list[str]:
        """Wait until all live nodes hold their requests; return the names of those that do not in time."""
        if not isinstance(request, PauseRequest | WeightsRequest):
            return []
        drain = request.drain_seconds if request.mode is PauseMode.DRAIN else 0.0
        late: list[str] = []
        with anyio.move_on_after(HOLD_SECONDS + drain):
            while True:
                changed = self._changed.next
                await self._look_at(record.pool)
                if not (late := await self._not_holding(record.pool)):
                    return []
                with anyio.move_on_after(HEARTBEAT_SECONDS):  # a silent node becomes a dead one without a change
                    await changed.wait()
        log.warning("nodes do not hold their requests in time", pool=record.pool, nodes=late)
        return late

    async def _not_holding(self, pool: str) -> list[str]:
        holding = self._records[pool].held_by
        nodes = await retry_until_stored("read the nodes", self._cluster.nodes)
        return [
            node.report.name
            for node in nodes
            if node.state in (NodeState.READY, NodeState.DRAINING)
            and node.silent_seconds < DEAD_SECONDS
            and node.report.owner not in holding
        ]

    @asynccontextmanager
    async def exclusive(self, pool: str) -> AsyncIterator[None]:
        """Keep all services from commanding a pool, and begin with its present state."""
        while True:
            changed = self._changed.next
            async with self._locks[pool]:
                await self._lead(pool)
                async with self._leading(pool):
                    await self._look_at(pool)
                    record = self._records.get(pool)
                    if record is None or not record.is_open:
                        async with self._saving_state(pool, record):
                            yield
                        return
            with anyio.move_on_after(HEARTBEAT_SECONDS):
                await changed.wait()

    @asynccontextmanager
    async def _saving_state(self, name: str, record: PoolRecord | None) -> AsyncIterator[None]:
        if record is not None:
            self._take_over(record)
        pool = self._pools[name]
        before = _lasting(pool.controller.state())
        yield
        state = pool.controller.state()
        if _lasting(state) == before:
            return
        revision = record.revision if record is not None else 0
        document = state.model_copy(update={"out": []}).model_dump_json()
        save = partial(self._store.save_state, name, revision, document)
        if await retry_until_stored("save the state of a pool", save):
            self._taken_over[name] = revision + 1

    async def _lead(self, pool: str) -> None:
        lead = partial(self._cluster.lead, _role(pool), self._owner)
        while True:
            if await retry_until_stored("lead a pool", lead) is not None:
                return
            await anyio.sleep(_ROLE_RETRY_SECONDS)

    @asynccontextmanager
    async def _leading(self, pool: str) -> AsyncIterator[None]:
        """Lead a pool within the block, whose error is raised as it is: callers tell by it whether to try again."""
        try:
            async with open_task_group() as tasks:
                tasks.start_soon(self._renew, pool)
                yield
                tasks.cancel_scope.cancel()
        finally:
            with anyio.move_on_after(_RESIGN_SECONDS, shield=True), suppress(StoreError):
                await self._cluster.resign(_role(pool), self._owner)

    async def _renew(self, pool: str) -> None:
        while True:
            await anyio.sleep(HEARTBEAT_SECONDS)
            with suppress(StoreError):
                await self._cluster.lead(_role(pool), self._owner)


def _role(pool: str) -> str:
    return f"pool:{pool}"


def _state(record: PoolRecord) -> PoolState:
    return PoolState.model_validate_json(record.state) if record.state else PoolState()


def _lasting(state: PoolState) -> PoolState:
    """Return the part of a state that other services have to know at once."""
    return state.model_copy(update={"out": [], "versions": {}})


def _error(result: CommandResult) -> InferenceError:
    if (info := result.error) is None:
        raise ValueError("the result of a command has neither an outcome nor an error")
    kinds = {kind.code: kind for kind in _family(InferenceError)}
    return kinds.get(info.code, InferenceError)(info.message, hint=info.hint, context=result.context)


def _family(kind: type[InferenceError]) -> list[type[InferenceError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _family(child))]
