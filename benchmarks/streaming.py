"""Measure what streaming adds to turns that run at once: time, and CPU time of the service.

A scripted engine in a process of its own samples at a steady pace, and 64 turns run at once against a pool in this
process: unstreamed, streamed as SGLang does with `--incremental-streaming-output`, and as it does without it.

- `added_`: the median turn's time, minus that of an unstreamed turn.
- `first_token_ms`: until a turn's first chunk; the engine itself takes `engine_first_token_ms` for the first token.
- `service_cpu_us_per_token`: CPU time of this process beyond that of unstreamed turns.

Run: python benchmarks/streaming.py [--json FILE] [--quick | --smoke]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from common import Figures, Options, percentile, report, run, scripted_engine

from rollout_service.engines.contract import GenerateRequest, SamplingOptions, TokenChunk, new_request_id
from rollout_service.engines.pool.pool import BackendPool
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions

TOKENS = 128
SECONDS_PER_TOKEN = 0.02
PROMPT = tuple(range(100))
SPREAD = 0.01
"""Seconds between the starts of two turns, as turns of a service do not begin in the same instant."""


@dataclass(slots=True)
class Round:
    """What some turns at once took."""

    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0


async def one_turn(pool: BackendPool, found: Round, *, is_streamed: bool) -> None:
    """Take one turn, and note its times."""
    started = time.perf_counter()
    first: list[float] = []

    def note(_: TokenChunk) -> None:
        if not first:
            first.append(time.perf_counter() - started)

    request = GenerateRequest(new_request_id(), PROMPT, SamplingOptions(max_new_tokens=TOKENS))
    generation = await pool.generate(request, on_tokens=note if is_streamed else None)
    found.seconds.append(time.perf_counter() - started)
    found.first += first
    if len(generation.output_ids) != TOKENS:
        raise RuntimeError(f"sampled {len(generation.output_ids)} tokens instead of {TOKENS}")


async def one_round(pool: BackendPool, found: Round, turns: int, *, is_streamed: bool) -> None:
    """Sample several turns at once, starting a little apart."""
    before = time.process_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(turns):
            tasks.start_soon(lambda: one_turn(pool, found, is_streamed=is_streamed))
            await anyio.sleep(SPREAD)
    found.cpu_seconds += time.process_time() - before


def figures(rounds: Mapping[str, Round], turns: int) -> Figures:
    """Return the figures of so many turns of each kind; those of the slower way to stream end in `_cumulative`."""
    plain = rounds["unstreamed"]
    found: Figures = {"engine_first_token_ms": SECONDS_PER_TOKEN * 1e3}
    for name, suffix in (("incremental", ""), ("cumulative", "_cumulative")):
        streamed = rounds[name]
        added = statistics.median(streamed.seconds) - statistics.median(plain.seconds)
        found |= {
            f"added_ms_per_turn{suffix}": added * 1e3,
            f"added_us_per_token{suffix}": added / TOKENS * 1e6,
            f"first_token_ms{suffix}": statistics.median(streamed.first) * 1e3,
            f"first_token_ms_p99{suffix}": percentile(streamed.first, 0.99) * 1e3,
            f"service_cpu_us_per_token{suffix}": (streamed.cpu_seconds - plain.cpu_seconds) / (turns * TOKENS) * 1e6,
        }
    return found | {"service_cpu_us_per_unstreamed_turn": plain.cpu_seconds / turns * 1e6}


async def main(given: Options) -> None:
    count, turns = given.plan((8, 64), (2, 64), (1, 4))
    rounds = {name: Round() for name in ("unstreamed", "incremental", "cumulative")}
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder)
        options = ["--latency", str(TOKENS * SECONDS_PER_TOKEN), "--turn", "word " * (4 * TOKENS)]
        async with (
            scripted_engine(address / "cumulative", *options) as slower,
            scripted_engine(address / "url", *options, "--incremental") as faster,
            Pools(PoolOptions(slow_start=0.0)) as pools,
        ):
            await pools.register(faster, pool="incremental")
            await pools.register(slower, pool="cumulative")
            for pool in ("incremental", "cumulative"):  # so that it is known how each streams
                await one_turn(pools[pool], Round(), is_streamed=True)
            for _ in range(count):
                await one_round(pools["incremental"], rounds["unstreamed"], turns, is_streamed=False)
                for pool in ("incremental", "cumulative"):
                    await one_round(pools[pool], rounds[pool], turns, is_streamed=True)
    settings = {"turns": turns, "tokens": TOKENS, "seconds_per_token": SECONDS_PER_TOKEN, "rounds": count}
    report("Streaming", given, settings, figures(rounds, count * turns), {})


if __name__ == "__main__":
    run(main, __doc__ or "")
