"""Measure the export of a run of 10,000 rollouts of 20 turns as a trace, and what it costs to record steps.

Run: python benchmarks/trace.py [--json FILE] [--quick | --smoke]

A store is filled with a run and the steps of its rollouts, as a service would have noted them: 256 rollouts at once, a
sandbox for each, and in each turn a call of one of 8 engines and a tool. A service is started on the store, and
`rollout-service trace` writes the run, as anyone would.

- `trace_seconds`, `trace_mb`, `trace_rss_mb`: the command from its start to its end, the size of the file, and the peak
  memory of the command; `trace_gz_seconds`, `trace_gz_mb`: the same for a compressed file;
- `perfetto_seconds`: from the choice of the compressed file in Perfetto's page, in a headless Chromium, to its tracks;
  nothing where `scripts/test` has not installed that page;
- `trace_cpu_seconds`, `server_cpu_seconds`: the CPU time of the command, and of the service meanwhile;
- `record_ms_per_turn`: the median time for which noting the two steps of a turn holds up a rollout;
- `save_ms_per_rollout`: the time to encode and compress the steps of a rollout, in a thread, after it has ended;
- `stored_kb_per_rollout`: what the store keeps of them.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

import anyio
import anyio.to_thread
from common import HERE, Figures, Options, report, run, scripted_engine, service, temporary_folder
from support.accounting import Run, run_measured

sys.path.insert(0, str(HERE.parent))  # the tests' browser
sys.path.insert(0, str(HERE.parent / "packaging"))  # Perfetto's page
from docs_site.perfetto import FOLDER, perfetto_page

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.tasks import Task
from rollout_service.activity import Activity, ActivityBoard, OpenStep, noting, waits_for
from rollout_service.engines.contract import new_request_id
from rollout_service.observability.tracing.steps import compress, encode
from rollout_service.store.contract import EncodedSteps
from rollout_service.store.runs_contract import ClosedSample, GroupClosure, NewGroup
from rollout_service.store.sqlite import SqliteStore
from tests.support.browser.watched_page import chromium

RUN_ID = "traced"
ROLLOUTS, QUICK_ROLLOUTS, SMOKE_ROLLOUTS = 10_000, 1_000, 16
TURNS, SAMPLES, AT_ONCE, ENGINES = 20, 8, 256, 8
TASK = Task(environment="math", instance={"question": "1", "answer": "1"})
ENVIRONMENT = HERE / "environments" / "echo"
NOTED_TURNS = 20_000


def recorded(number: int, draw: random.Random, began: float) -> Activity:
    """Return the record of a rollout, as if it had run as one of `AT_ONCE` at a time."""
    activity = Activity(f"{RUN_ID}.{number // SAMPLES}.{number % SAMPLES}", attempt=1, environment="shell")
    activity.run_id, activity.group = RUN_ID, number // SAMPLES
    activity.started_at = began + number // AT_ONCE * 60.0 + draw.random()
    activity.outcome = {"state": "completed", "reward": 1.0, "stop_reason": "finished"}
    now = activity.started
    sandbox = {"sandbox": f"s-{number:08x}"}

    def add(kind: StepKind, name: str, seconds: float, **detail: object) -> None:
        nonlocal now
        step = OpenStep(kind, name, "", activity.stage, dict(detail))
        step.started, now = now, now + seconds
        step.ended = now
        activity.ended.append(step)
        now += 0.0003

    def enter(stage: Stage) -> None:
        activity.stage = stage
        activity.stages.append((stage, now))
        add(StepKind.PLACE, stage, 0.00001)
        add(StepKind.WORKER, stage, 0.5 * draw.random())

    enter(Stage.INIT)
    add(StepKind.SANDBOX_START, "base", 0.4, **sandbox)
    add(StepKind.SETUP, "shell", 0.1)
    enter(Stage.ROLLOUT)
    engine = f"policy@10.0.0.{draw.randrange(ENGINES)}:30000"
    for turn in range(TURNS):
        of_turn = {"turn": turn, "segment": 0, "prompt_tokens": 900 + 400 * turn}
        sampled = {"tokens": draw.randrange(20, 400), "cached_tokens": 400 * turn, "version": number // 2_000}
        request = {"request": f"{new_request_id()}-0000"}
        add(StepKind.ENGINE, engine, 1.0 + draw.random(), **of_turn, **request, **sampled)
        add(StepKind.TOOL, "bash", draw.random(), call=f"call-{turn}-0", command="pytest -q tests", **sandbox)
    enter(Stage.EVALUATE)
    add(StepKind.GRADER, "shell", 0.3, reward=1.0)
    add(StepKind.SANDBOX_END, "", 0.1, **sandbox)
    add(StepKind.STORE, "write a result", 0.004)
    activity.finished = now
    return activity


async def fill(database: Path, rollouts: int) -> float:
    """Fill a store with a run and its steps; return the bytes of a rollout's steps."""
    draw, size = random.Random(0), 0
    groups = rollouts // SAMPLES
    order = RunRequest(
        run_id=RUN_ID,
        source=InlineTasks(tasks=[TASK] * groups),
        group_size=SAMPLES,
        batch_size=groups,
        filters=[],
        infrastructure_retries=0,
    )
    async with await SqliteStore.open(database) as store:
        await store.runs.create(order, tasks=groups, digest=None, version=0)
        began = time.time()
        for number in range(groups):
            ids = [f"{RUN_ID}.{number}.{sample}" for sample in range(SAMPLES)]
            requests = [RolloutRequest(rollout_id=one, task=TASK) for one in ids]
            await store.runs.start_groups(RUN_ID, [NewGroup(number, 0, requests)])
            async with anyio.create_task_group() as tasks:
                for lease in await store.claim("fill", limit=SAMPLES, lease_seconds=600):
                    result = Rollout(
                        rollout_id=lease.rollout_id,
                        state=RolloutState.COMPLETED,
                        task=TASK,
                        pool="policy",
                        reward=1.0,
                        created_at=lease.created_at,
                    )
                    tasks.start_soon(store.finish, lease, "fill", result)
            samples = [ClosedSample(n, one, True, None, 0.0, None) for n, one in enumerate(ids)]
            await store.runs.close_group(RUN_ID, GroupClosure(number, None, samples, 0.0, 0.0, 7, 7))
            steps = [
                EncodedSteps(one, compress(encode(recorded(number * SAMPLES + n, draw, began))))
                for n, one in enumerate(ids)
            ]
            size += sum(len(one.data) for one in steps)
            await store.save_steps(steps)
    return size / (groups * SAMPLES)


def traced(url: str, file: Path) -> Run:
    """Write the trace with the command."""
    return run_measured([sys.executable, "-m", "rollout_service.cli", "trace", RUN_ID, "-o", str(file), "--url", url])


async def opening_seconds(file: Path, turns: int) -> float | None:
    """Return how long Perfetto takes to show a trace with so many turns, or None if it is not installed."""
    if not FOLDER.exists():
        return None
    async with chromium() as browser, perfetto_page(browser, file) as shown:
        problems = "select name from stats where severity in ('error', 'data_loss') and value > 0"
        if found := await shown.rows(problems):
            raise SystemExit(f"Perfetto reports problems with the trace: {found}")
        if await shown.rows("select count(*) from slice where name like 'turn %'") != [turns]:
            raise SystemExit("Perfetto does not show all turns of the trace")
        return shown.open_seconds


def recording_seconds() -> float:
    """Return the median seconds that noting a turn takes: the call of an engine, and one of a tool."""
    board, seconds = ActivityBoard(), []
    for _ in range(NOTED_TURNS // TURNS):
        with board.working("r", attempt=1, environment="shell"):
            for turn in range(TURNS):
                started = time.perf_counter()
                with noting(turn=turn, segment=0), waits_for(StepKind.ENGINE, "e", request="r") as step:
                    step.note(tokens=3, cached_tokens=2, version=1)
                with waits_for(StepKind.TOOL, "bash", call="c", command="ls", sandbox="s"):
                    pass
                seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def saving_seconds() -> float:
    """Return the median seconds that the steps of a rollout take to encode."""
    activity, seconds = recorded(0, random.Random(0), time.time()), []
    for _ in range(200):
        started = time.perf_counter()
        compress(encode(activity))
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


async def noted() -> tuple[float, float]:
    """Return the costs of the record on an event loop, as in a service."""
    return recording_seconds(), saving_seconds()


async def main(given: Options) -> None:
    rollouts = given.plan(ROLLOUTS, QUICK_ROLLOUTS, SMOKE_ROLLOUTS)
    recording, saving = await noted()
    with temporary_folder() as folder:
        size = await fill(folder / "rollouts.sqlite3", rollouts)
        file, packed = folder / "trace.json", folder / "trace.json.gz"
        async with (
            scripted_engine(folder / "engine.address") as url,
            service(folder, url, workers=1, environment=ENVIRONMENT) as server,
        ):
            before = server.cpu_seconds
            plain = await anyio.to_thread.run_sync(traced, server.client.base_url, file)
            served = server.cpu_seconds - before
            compressed = await anyio.to_thread.run_sync(traced, server.client.base_url, packed)
        figures: Figures = {
            "trace_seconds": plain.seconds,
            "trace_cpu_seconds": plain.cpu_seconds,
            "server_cpu_seconds": served,
            "trace_mb": file.stat().st_size / 1e6,
            "trace_rss_mb": plain.peak_mb,
            "trace_gz_seconds": compressed.seconds,
            "trace_gz_mb": packed.stat().st_size / 1e6,
            "perfetto_seconds": await opening_seconds(packed, rollouts * TURNS),
            "record_ms_per_turn": recording * 1e3,
            "save_ms_per_rollout": saving * 1e3,
            "stored_kb_per_rollout": size / 1e3,
        }
    aims = {"trace_seconds": "< 10", "trace_mb": "< 100", "record_ms_per_turn": "<= 0.05"}
    report("A run as a trace", given, {"rollouts": rollouts, "turns": TURNS}, figures, aims)


if __name__ == "__main__":
    run(main, __doc__ or "")
