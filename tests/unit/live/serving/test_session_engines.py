"""What the engines of a live session are asked for."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from prometheus_client import CollectorRegistry

from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.contract import GenerateRequest, Generation, TokenSink
from rollout_service.engines.errors import NoBackendError
from rollout_service.engines.serving.policies import PoolModel
from rollout_service.engines.shipped import policy_folder
from rollout_service.gateway.contract import ClientMessage, Dialect, ModelCall
from rollout_service.gateway.metrics import GatewayMetrics
from rollout_service.live.metrics import LiveMetrics
from rollout_service.live.register import PoolHeldError
from rollout_service.live.serving.engines import SessionEngines, Unrecorded
from rollout_service.settings.http import GatewaySettings
from rollout_service.settings.live import LiveSettings
from rollout_service.tokens import ChatRenderer
from tests.support.gateway.manual_pool import ManualPool

pytestmark = pytest.mark.anyio
MODEL = PoolModel(ChatRenderer.load(policy_folder("calc-tuned")), 1_000)


class OnePool(ManualPool):
    paused = False
    in_service = True

    def __init__(self) -> None:
        super().__init__()
        self.affinities: list[str | None] = []

    async def generate(
        self, request: GenerateRequest, *, affinity: str | None = None, on_tokens: TokenSink | None = None
    ) -> Generation:
        self.affinities.append(affinity)
        return await super().generate(request, affinity=affinity, on_tokens=on_tokens)


class OnePolicy:
    """Serves the pool `policy`."""

    def __init__(self) -> None:
        self.pool = OnePool()

    def check(self, pool: str) -> None:
        self.connect(pool)

    def connect(self, pool: str) -> tuple[PoolModel, OnePool]:
        if pool != "policy":
            raise NoBackendError("none")
        return MODEL, self.pool


@asynccontextmanager
async def engines(*, share_prefixes: bool) -> AsyncIterator[tuple[SessionEngines, OnePool]]:
    registry, policy, signal = CollectorRegistry(), OnePolicy(), ChangeSignal()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            yield (
                SessionEngines(
                    policies=policy,
                    settings=LiveSettings(share_prefixes=share_prefixes),
                    gateway=GatewaySettings(),
                    tasks=tasks,
                    metrics=GatewayMetrics(registry),
                    live_metrics=LiveMetrics(registry),
                    changed=lambda: signal.next,
                    url="http://gateway",
                ),
                policy.pool,
            )
            tasks.cancel_scope.cancel()


CALL = ModelCall(dialect=Dialect.CHAT, model="p", messages=(ClientMessage("user", "hi"),))


async def test_calls_of_no_session_are_not_taken_for_turns_of_the_oldest_rollout():
    async with engines(share_prefixes=True) as (connected, pool):
        for session_id in ("", "s"):
            observer = Unrecorded("no-session")
            await connected.open("policy", "t", observer, lambda _: None, session_id=session_id).answer(CALL)
        await anyio.wait_all_tasks_blocked()
        assert pool.affinities == [None, "live/t/s"]


async def requests(*, share_prefixes: bool) -> list[GenerateRequest]:
    """Return what engines are asked for one call of each of two tenants, and another of the first."""
    async with engines(share_prefixes=share_prefixes) as (connected, pool):
        for tenant in ("one", "two", "one"):
            session = connected.open("policy", tenant, Unrecorded("no-session"), lambda _: None)
            await session.answer(CALL)
            await anyio.wait_all_tasks_blocked()
        return [each.request for each in pool.calls]


async def test_an_answer_may_be_as_long_as_the_context_allows_and_tenants_may_share_prefixes() -> None:
    [first, second, _] = await requests(share_prefixes=True)
    assert first.cache_salt == second.cache_salt == ""
    assert first.sampling.max_new_tokens == 1_000 - 1 - len(first.input_ids)


async def test_a_pool_that_is_not_served_yet_is_to_be_asked_later() -> None:
    async with engines(share_prefixes=True) as (connected, _):
        with pytest.raises(PoolHeldError):
            connected.open("none", "t", Unrecorded("no-session"), lambda _: None)
        with pytest.raises(NoBackendError):
            connected.policies.check("none")
