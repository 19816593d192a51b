"""The metrics of engines count every request once, exist before the first, and go with their backend."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rollout_service.engines.contract import GenerateRequest, SamplingOptions, new_request_id
from rollout_service.engines.errors import InferenceError
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.observability.telemetry.engines import PoolMetrics
from rollout_service.testing import Counting, Fault, ScriptedEngine

pytestmark = pytest.mark.anyio

OPTIONS = PoolOptions(
    hold_seconds=0.1,
    probe_interval=0.05,
    probe_timeout=0.5,
    slow_start=0.0,
    registration_timeout=5.0,
    max_failures=1,
)


class Watched:
    """Pools with one engine, and what their metrics say."""

    def __init__(self, pools: Pools, backend: str, registry: CollectorRegistry) -> None:
        self.pools = pools
        self.backend = backend
        self._registry = registry

    def samples(self) -> dict[tuple[str, str], float]:
        """Return the samples of this backend by name and outcome."""
        found = {}
        for family in text_string_to_metric_families(generate_latest(self._registry).decode()):
            for sample in family.samples:
                if sample.labels.get("backend") == self.backend and "le" not in sample.labels:
                    found[sample.name, sample.labels.get("outcome", "")] = sample.value
        return found

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of one series."""
        generate_latest(self._registry)
        return self._registry.get_sample_value(name, labels)

    async def generate(self, budget: int = 4) -> None:
        """Ask for one turn."""
        request = GenerateRequest(new_request_id(), [1, 2, 3], SamplingOptions(max_new_tokens=budget))
        await self.pools["policy"].generate(request)


@asynccontextmanager
async def watched(engine: ScriptedEngine) -> AsyncIterator[Watched]:
    async with engine, Pools(OPTIONS) as pools:
        registry = CollectorRegistry()
        pools.observe(PoolMetrics(registry, pools.views))
        view = await pools.register(engine.url)
        yield Watched(pools, view.backend_id, registry)


async def test_a_backend_has_all_series_before_its_first_request() -> None:
    async with watched(ScriptedEngine(Counting())) as one:
        found = {key: value for key, value in one.samples().items() if not key[0].endswith("_created")}
        assert found == {
            ("rollout_backend_in_flight", ""): 0,
            ("rollout_backend_requests_total", "answered"): 0,
            ("rollout_backend_requests_total", "failed"): 0,
            ("rollout_backend_requests_total", "cancelled"): 0,
            ("rollout_backend_seconds_count", ""): 0,
            ("rollout_backend_seconds_sum", ""): 0,
        }
        assert one.value("rollout_turn_seconds_count", pool="policy") == 0
        assert one.value("rollout_weights_update_seconds_count", pool="policy", outcome="failed") == 0


async def test_requests_are_counted_by_how_they_end() -> None:
    engine = ScriptedEngine(Counting())
    async with watched(engine) as one:
        await one.generate()
        await one.generate()
        engine.inject(Fault.ERROR)
        with pytest.raises(InferenceError):
            await one.generate()
        engine.inject(Fault.HANG)
        with anyio.move_on_after(0.2) as scope:
            await one.generate()
        assert scope.cancelled_caught
        await anyio.wait_all_tasks_blocked()  # the observer is told after the answer is passed on
        samples = one.samples()
        assert samples["rollout_backend_requests_total", "answered"] == 2
        assert samples["rollout_backend_requests_total", "cancelled"] == 1
        assert samples["rollout_backend_requests_total", "failed"] == 1
        assert samples["rollout_backend_seconds_count", ""] == 2, "only answers are timed"
        assert samples["rollout_backend_in_flight", ""] == 0
        assert one.value("rollout_turn_seconds_count", pool="policy") == 2


async def test_updates_of_the_weights_are_timed_by_what_becomes_of_them() -> None:
    async with watched(ScriptedEngine(Counting())) as one:
        await one.pools["policy"].update_weights("/weights/1", 1)
        await one.pools["policy"].update_weights("/weights/1", 1)  # changes nothing
        count = "rollout_weights_update_seconds_count"
        assert one.value(count, pool="policy", outcome="loaded") == 1
        assert one.value(count, pool="policy", outcome="failed") == 0


async def test_the_series_of_a_backend_go_with_it() -> None:
    async with watched(ScriptedEngine(Counting())) as one:
        await one.generate()
        assert one.samples()
        await one.pools.remove(one.backend)
        assert one.samples() == {}
        assert one.value("rollout_turn_seconds_count", pool="policy") == 1, "the pool's own figures stay"
