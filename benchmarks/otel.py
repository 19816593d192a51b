"""Measure what traces cost a turn: off, on, and for rollouts that are not sampled.

Run: python benchmarks/otel.py [--json FILE] [--quick | --smoke]

Attempts are played as the service notes them, without engines or sandboxes: each turn waits for an engine and calls a
tool. The kinds take turns in each round; figures are medians over the rounds.

- `off_us_per_turn`: CPU time of the event loop's thread for noting a turn's steps, with nobody told.
- `on_us_per_turn`: what it takes more if spans are made and queued; `on_process_us_per_turn` has the exporting thread
  too. The spans go to a collector in another process.
- `unsampled_us_per_turn`: what it takes more if the rollout is not sampled.
- `spans_per_turn`, `lost_spans`: how many are made, and how many of them were dropped or failed.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import anyio
from common import Options, child, report, run
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from prometheus_client import CollectorRegistry

from api_schemas.inference import BackendState, BackendView
from api_schemas.rollouts import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.trajectories import FinishReason
from rollout_service.activity import ActivityBoard, waits_for
from rollout_service.engines.contract import GenerateRequest, Generation, SamplingOptions, new_request_id
from rollout_service.observability.tracing.otel.export import Exporter
from rollout_service.observability.tracing.otel.observer import TraceObserver

AIMS = {"off_us_per_turn": "<= 10", "on_us_per_turn": "<= 250", "unsampled_us_per_turn": "<= 10"}
TURNS = 20
BACKEND = BackendView(
    backend_id="engine",
    url="http://gpu-1:30000",
    pool="policy",
    state=BackendState.READY,
    model_path="model",
    tokenizer_path="model",
    weight_version=0,
    context_length=32_768,
    in_flight=0,
    served=0,
    failures=0,
)
REQUEST = GenerateRequest(new_request_id(), list(range(1_000)), SamplingOptions(seed=1))
ANSWER = Generation(
    output_ids=[1] * 100,
    logprobs=[0.0] * 100,
    versions=[0] * 100,
    finish_reason=FinishReason.STOP,
    prompt_tokens=1_000,
    cached_tokens=900,
    backend_id="engine",
    engine_seconds=1.0,
)


def play(board: ActivityBoard, rollout_id: str, turns: int) -> None:
    """Play the rollout stage of an attempt."""
    with board.working(rollout_id, attempt=1, environment="bench") as activity:
        activity.stage = Stage.ROLLOUT
        with waits_for(StepKind.PLACE, "rollout"):
            pass
        for _ in range(turns):
            with waits_for(StepKind.ENGINE, "engine", request=REQUEST.request_id, prompt_tokens=1_000) as step:
                step.request, step.answer = REQUEST, ANSWER
                step.note(tokens=100, cached_tokens=900)
            with waits_for(StepKind.TOOL, "bash", call="call-1"):
                pass


class Kind:
    """One way to observe attempts, and what it took."""

    def __init__(self, exporter: Exporter | None) -> None:
        self.board = ActivityBoard()
        if exporter is not None:
            tracer = exporter.provider.get_tracer("benchmark")
            self.board.observe(TraceObserver(tracer, exporter.ids, lambda: [BACKEND]))
        self.thread: list[float] = []
        self.process: list[float] = []

    async def measure(self, number: int, attempts: int, exported: Callable[[], bool]) -> None:
        """Play attempts, and wait until their spans are sent."""
        thread, process = time.thread_time(), time.process_time()
        for attempt in range(attempts):
            play(self.board, f"{number}-{attempt}", TURNS)
        self.thread.append((time.thread_time() - thread) / attempts / TURNS * 1e6)
        with anyio.fail_after(60):
            while not exported():  # noqa: ASYNC110 - another thread counts
                await anyio.sleep(0.1)
        self.process.append((time.process_time() - process) / attempts / TURNS * 1e6)


def counted(registry: CollectorRegistry, outcome: str) -> float:
    """Return how many spans had this outcome."""
    return registry.get_sample_value("rollout_trace_spans_total", {"outcome": outcome}) or 0.0


async def main(given: Options) -> None:
    rounds, attempts = given.plan((25, 10), (5, 10), (1, 2))
    spans = 3 + 2 * TURNS  # the attempt, its stage, its agent, and two for each turn
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder) / "address"
        program = Path(__file__).parent / "programs/discarding_collector.py"
        async with child([str(program), str(address)], address) as url:
            os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = url
            os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "200"
            registry, unsampled = CollectorRegistry(), CollectorRegistry()
            on = Exporter(registry, "benchmark")
            off = Exporter(unsampled, "benchmark", sampler=ParentBased(ALWAYS_OFF))
            kinds = {"off": Kind(None), "on": Kind(on), "unsampled": Kind(off)}
            for number in range(rounds):
                expected = (number + 1) * attempts * spans
                for name, kind in kinds.items():
                    done = (lambda wanted=expected: sent(registry) >= wanted) if name == "on" else (lambda: True)
                    await kind.measure(number, attempts, done)
            await on.close()
            await off.close()
    thread = {name: statistics.median(kind.thread) for name, kind in kinds.items()}
    process = {name: statistics.median(kind.process) for name, kind in kinds.items()}
    figures = {
        "off_us_per_turn": thread["off"],
        "on_us_per_turn": thread["on"] - thread["off"],
        "on_process_us_per_turn": process["on"] - process["off"],
        "unsampled_us_per_turn": thread["unsampled"] - thread["off"],
        "spans_per_turn": sent(registry) / (rounds * attempts * TURNS),
        "lost_spans": counted(registry, "dropped") + counted(registry, "failed"),
    }
    settings = {"turns": TURNS, "attempts": attempts, "rounds": rounds}
    report("What traces cost", given, settings, figures, AIMS)


def sent(registry: CollectorRegistry) -> float:
    """Return how many spans have left."""
    return sum(counted(registry, outcome) for outcome in ("exported", "failed", "dropped"))


if __name__ == "__main__":
    run(main, "Measure what traces cost a turn.")
