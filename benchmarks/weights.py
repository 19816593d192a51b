"""Measure the cost of weight updates for the rollouts under way, and whether every token is accounted for.

Run: python benchmarks/weights.py [--json FILE] [--quick | --smoke]
It needs scripts/install-sglang.

32 rollouts of many turns run on 2 real SGLang servers on the CPU, through this service's pool, while weights are loaded
into the pool from disk 20 times in mode `abort`; every version is another random model. Then weights are loaded 5 times
in mode `in_place`; the figures of this phase begin with `in_place_`.

- `lost_tokens`, `duplicated_tokens`: tokens of the engines' answers, recorded as they arrive, that a turn lacks or has
  twice. A difference between the prompt of a resumed request and the turn's prompt plus its sampled tokens counts too.
- `max_logprob_error`: the largest difference between a token's logprob and the one that transformers computes for it
  with the weights of its version, reading the whole turn anew. In mode `in_place`, tokens that a turn marks as sampled
  on KV of older weights (`kept_kv_versions`) are left out, and counted as `in_place_kept_kv_tokens`.
- `held_ms_p50`: the time from the update request until turns are sent again.
- `stall_ms_p50`: the part of that time in which engines had no calls open except turns that stood still. The service
  adds this part to the engines' own pausing, loading and flushing.
- `engine_ms_p50`: the other part; `pause`, `load` and `resume` are its steps, each measured at the slower engine.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from common import HERE, Figures, Options, report, run
from routing import servers_of

from api_schemas.inference import PauseMode, PoolOutcome
from rollout_service.engines.contract import (
    GenerateRequest,
    Generation,
    SamplingOptions,
    TokenSink,
    new_request_id,
)
from rollout_service.engines.kinds.registry import Connect, EngineKinds
from rollout_service.engines.kinds.sglang.backend import SGLangBackend
from rollout_service.engines.local_servers.cpu_server import DEFAULT_ENVIRONMENT
from rollout_service.engines.pool.pool import BackendPool
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.testing import write_random_checkpoint

RECOMPUTE = HERE.parent / "tests" / "support" / "engines" / "recompute_logprobs.py"
BASE_ID_LENGTH = 32  # the part of a request id that its attempts share
VOCABULARY = range(3, 250)
KV_TOKENS = 40_000
AIMS = {
    "lost_tokens": "0",
    "duplicated_tokens": "0",
    "max_logprob_error": "<= 1e-3",
    "stall_ms_p50": "<= 50",
    "in_place_lost_tokens": "0",
    "in_place_duplicated_tokens": "0",
    "in_place_max_logprob_error": "<= 1e-3",
}


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a turn from one call to an engine."""

    prompt: list[int]
    output: list[int]


@dataclass(frozen=True, slots=True)
class Span:
    """The time during which a call to an engine was open."""

    start: float
    end: float
    is_turn: bool


@dataclass(slots=True)
class Record:
    """Everything sent between the pool and the engines, recorded independently of the pool."""

    spans: list[Span] = field(default_factory=list)
    parts: dict[str, list[Part]] = field(default_factory=lambda: defaultdict(list))
    turns: list[tuple[GenerateRequest, Generation]] = field(default_factory=list)


class RecordedBackend(SGLangBackend):
    """A backend that records its calls."""

    def __init__(self, url: str, *, backend_id: str, record: Record) -> None:
        super().__init__(url, backend_id=backend_id)
        self._record = record

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        answer = await super().generate(request, on_tokens)
        part = Part(list(request.input_ids), list(answer.output_ids))
        self._record.parts[request.request_id[:BASE_ID_LENGTH]].append(part)
        return answer

    async def _exchange_bytes(self, method: str, path: str, *body: Any, **settings: Any) -> bytes:
        started = time.perf_counter()
        try:
            return await super()._exchange_bytes(method, path, *body, **settings)
        finally:
            span = Span(started, time.perf_counter(), path == "/generate")
            self._record.spans.append(span)


@dataclass(frozen=True, slots=True)
class Update:
    asked: float
    outcome: PoolOutcome
    held_ms: float
    engine_ms: float

    @property
    def stall_ms(self) -> float:
        """The time in which no engine was working on a call."""
        return self.held_ms - self.engine_ms

    def step_ms(self, name: str) -> float:
        """Return the time that a step took at the slower engine."""
        return 1e3 * max(each.steps[name] for each in self.outcome.outcomes)


async def roll_out(pool: BackendPool, record: Record, name: str, seed: int) -> None:
    """Hold conversations one after the other, forever."""
    rng = random.Random(seed)
    conversation = 0
    while True:
        conversation += 1
        affinity = f"{name}-{conversation}"
        ids = rng.choices(VOCABULARY, k=60)
        for _ in range(5):
            sampling = SamplingOptions(max_new_tokens=rng.randint(20, 80), seed=rng.randrange(2**31))
            request = GenerateRequest(new_request_id(), list(ids), sampling)
            answer = await pool.generate(request, affinity=affinity)
            record.turns.append((request, answer))
            ids += [*answer.output_ids, *rng.choices(VOCABULARY, k=12)]
        pool.release(affinity)


@dataclass(frozen=True, slots=True)
class Setting:
    """The numbers of updates, the time between two, and what they interrupt."""

    updates: int
    in_place: int
    interval: float
    engines: int = 2
    rollouts: int = 32


FULL = Setting(updates=20, in_place=5, interval=1.5)
QUICK = Setting(updates=8, in_place=3, interval=1.0)
SMOKE = Setting(updates=1, in_place=1, interval=0.5, engines=1, rollouts=4)


async def update_often(
    pool: BackendPool, record: Record, models: Mapping[int, Path], mode: PauseMode, interval: float
) -> list[Update]:
    """Load these weights, one after the other, while the rollouts run."""
    asked: list[tuple[float, PoolOutcome]] = []
    for version, folder in models.items():
        await anyio.sleep(interval)
        started = time.perf_counter()
        outcome = await pool.update_weights(str(folder), version, mode)
        if not all(each.ok for each in outcome.outcomes):
            raise RuntimeError(f"an update failed: {outcome}")
        asked.append((started, outcome))
    await anyio.sleep(interval)
    return [measured(start, outcome, record.spans) for start, outcome in asked]


def measured(asked: float, outcome: PoolOutcome, spans: Sequence[Span]) -> Update:
    """Return how long turns were held, and for how much of that time any engine was working."""
    answered = asked + outcome.held_seconds
    released = min((span.start for span in spans if span.is_turn and span.start >= answered), default=answered)
    at_work, until = 0.0, asked
    for span in sorted(spans, key=lambda each: each.start):
        if span.is_turn and span.end > released:
            continue  # it stood still, or was sent afterwards
        start, end = max(span.start, until), min(span.end, released)
        if end > start:
            at_work, until = at_work + end - start, end
    return Update(asked, outcome, 1e3 * (released - asked), 1e3 * at_work)


def account(record: Record) -> tuple[int, int]:
    """Count the lost and the duplicated tokens of all turns."""
    lost = duplicated = 0
    for request, answer in record.turns:
        sampled: list[int] = []
        for part in record.parts[request.request_id]:
            before = [*request.input_ids, *sampled]
            missing, surplus = difference(before, part.prompt)
            lost, duplicated = lost + missing, duplicated + surplus
            sampled += part.output
        missing, surplus = difference(sampled, answer.output_ids)
        lost, duplicated = lost + missing, duplicated + surplus
        if answer.finish_reason.value == "length":
            budget = request.sampling.max_new_tokens
            lost += max(0, budget - len(answer.output_ids))
            duplicated += max(0, len(answer.output_ids) - budget)
    return lost, duplicated


def difference(expected: Sequence[int], found: Sequence[int]) -> tuple[int, int]:
    """Count the tokens of `expected` and of `found` after their common prefix: the missing and the surplus ones."""
    same = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
        min(len(expected), len(found)),
    )
    return len(expected) - same, len(found) - same


async def compared(record: Record, models: Mapping[int, Path], prefix: str = "") -> Figures:
    """Return the largest error of a logprob, how many tokens were compared, and how many cannot be compared."""
    by_version: dict[int, list[Generation]] = defaultdict(list)
    orders: dict[int, dict[str, Any]] = {}
    for request, answer in record.turns:
        for version in set(answer.versions):
            order = orders.setdefault(version, {"model": str(models[version]), "sequences": []})
            order["sequences"].append(
                {"prompt": list(request.input_ids), "output": answer.output_ids, "temperature": 1.0}
            )
            by_version[version].append(answer)
    finished = await anyio.run_process(
        [str(DEFAULT_ENVIRONMENT / "bin" / "python"), str(RECOMPUTE)],
        input=json.dumps(list(orders.values())).encode(),
        stderr=None,
    )
    errors = [
        abs(stated - computed)
        for version, results in zip(orders, json.loads(finished.stdout), strict=True)
        for answer, logprobs in zip(by_version[version], results, strict=True)
        for stated, computed, at in zip(answer.logprobs, logprobs, answer.versions, strict=True)
        if at == version and version not in answer.kept_kv_versions
    ]
    tokens = sum(len(answer.output_ids) for _, answer in record.turns)
    return {
        f"{prefix}max_logprob_error": max(errors, default=None),
        f"{prefix}compared_tokens": len(errors),
        f"{prefix}kept_kv_tokens": tokens - len(errors),
    }


@asynccontextmanager
async def rolling(urls: Sequence[str], rollouts: int, record: Record) -> AsyncIterator[BackendPool]:
    """Run a pool of these engines under the load of so many rollouts."""

    class Recorded(EngineKinds):
        def get(self, kind: str) -> Connect:
            del kind
            return partial(RecordedBackend, record=record)

    async with Pools(PoolOptions(slow_start=0.0), kinds=Recorded()) as pools:
        for url in urls:
            await pools.register(url)
        pool = pools["policy"]
        async with anyio.create_task_group() as tasks:
            for number in range(rollouts):
                tasks.start_soon(roll_out, pool, record, f"rollout-{number}", number)
            yield pool
            tasks.cancel_scope.cancel()


def figures_of(updates: Sequence[Update], record: Record, prefix: str = "") -> Figures:
    lost, duplicated = account(record)
    split = sum(len(set(answer.versions)) > 1 for _, answer in record.turns)
    figures: Figures = {
        "updates": len(updates),
        "lost_tokens": lost,
        "duplicated_tokens": duplicated,
        "turns": len(record.turns),
        "turns_of_several_versions": split,
        "tokens": sum(len(answer.output_ids) for _, answer in record.turns),
        "held_requests_p50": statistics.median([update.outcome.held for update in updates]),
        "held_ms_p50": statistics.median([update.held_ms for update in updates]),
        "stall_ms_p50": statistics.median([update.stall_ms for update in updates]),
        "stall_ms_max": max(update.stall_ms for update in updates),
        "engine_ms_p50": statistics.median([update.engine_ms for update in updates]),
    }
    for step in ("pause", "load", "resume"):
        figures[f"{step}_ms_p50"] = statistics.median([update.step_ms(step) for update in updates])
    return {prefix + name: value for name, value in figures.items()}


async def main(options: Options) -> None:
    setting = options.plan(FULL, QUICK, SMOKE)
    exact, kept = Record(), Record()
    with tempfile.TemporaryDirectory() as folder:
        count = 1 + setting.updates + setting.in_place
        models = [write_random_checkpoint(Path(folder, str(seed)), seed=seed) for seed in range(count)]
        versions = dict(enumerate(models))
        async with servers_of(models[0], setting.engines, KV_TOKENS) as urls:
            async with rolling(urls, setting.rollouts, exact) as pool:
                wanted = {version: versions[version] for version in range(1, 1 + setting.updates)}
                updates = await update_often(pool, exact, wanted, PauseMode.ABORT, setting.interval)
            async with rolling(urls, setting.rollouts, kept) as pool:
                wanted = {version: versions[version] for version in range(1 + setting.updates, count)}
                in_place = await update_often(pool, kept, wanted, PauseMode.IN_PLACE, setting.interval)
        figures = figures_of(updates, exact) | await compared(exact, versions)
        figures |= figures_of(in_place, kept, "in_place_") | await compared(kept, versions, "in_place_")
    report("Weight updates", options, dict(asdict(setting)), figures, AIMS)


if __name__ == "__main__":
    run(main, "Measure the cost of weight updates for the rollouts under way.")
