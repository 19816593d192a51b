"""Measure the lists of a store with a million rollouts, over HTTP, from a real service that nothing else uses.

Run: python benchmarks/support/dashboard/lists.py [--rollouts N]

The store is filled through its schema, with its triggers, but without a flush per rollout: a million take one minute.
Most rollouts are of one long run of groups of eight, some of short runs and some of none; a twentieth has failed. Each
figure is the median of the time for a page of 100, from the request to the whole answer: `list_ms_p50` of the newest
rollouts, `list_worst_ms_p50` of the slowest search, and one for each search.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path

import anyio
import httpx

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Span, Stage, StopReason, Usage
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.tasks import Task
from rollout_service.cli.server_child import stop
from rollout_service.groups.figures import PHASES, GroupFigures
from rollout_service.store.codec.history import encode_record
from rollout_service.store.codec.rollouts import encode_result
from rollout_service.store.codec.runs import encode_request, encode_samples, encode_summary
from rollout_service.store.runs_contract import ClosedSample, GroupClosure
from rollout_service.store.sqlite.connection import Database
from rollout_service.store.sqlite.lists.history import RECORDS_IN_ROW
from sandboxes.host.children import start_process

ROLLOUTS = 1_000_000
REQUESTS = 11
"""How often each search is made; the first one, which reads the file, does not count."""
START_SECONDS = 120.0
GROUP_SIZE = 8
SHORT_RUNS = 20
AT_ONCE = 20_000
START = 1_750_000_000.0
ENVIRONMENTS = ("math", "calc", "swe", "code")
CODES = ("engine_unreachable", "stage_timeout", "sandbox_start_failed", "agent_failed")
RARE = "grader_failed"

SEARCHES: Mapping[str, str] = {
    "newest": "",
    "oldest": "order=oldest",
    "failed": "state=failed",
    "completed": "state=completed",
    "three_states": "state=failed&state=cancelled&state=queued",
    "run": "run=long",
    "old_run": "run=short-1",
    "group": "run=long&group=77",
    "failed_in_run": "run=short-1&state=failed",
    "environment": "environment=swe",
    "error": "error=stage_timeout",
    "rare_error": f"error={RARE}",
    "rare_error_in_run": f"run=long&error={RARE}",
    "reward": "reward_min=0.9",
    "no_such_reward": "reward_min=2",
    "id": "text=short-1.11",
    "many_ids": "text=long.",
    "hours": f"since={datetime.fromtimestamp(START + 3_600, UTC):%Y-%m-%dT%H:%M:%SZ}"
    f"&until={datetime.fromtimestamp(START + 7_200, UTC):%Y-%m-%dT%H:%M:%SZ}",
}
"""Searches by the names of their figures."""


async def measure(rollouts: int) -> dict[str, float]:
    """Fill a store with so many rollouts, serve it, and return how long its lists take."""
    with tempfile.TemporaryDirectory(prefix="lists-", ignore_cleanup_errors=True) as name:
        file = Path(name) / "rollouts.sqlite3"
        begun = time.perf_counter()
        await anyio.to_thread.run_sync(fill, file, rollouts)
        filled = time.perf_counter() - begun
        size = file.stat().st_size / 1e6
        about = {"list_rollouts": float(rollouts), "list_fill_seconds": filled, "list_file_mb": size}
        return about | await measure_filled(Path(name))


async def measure_filled(state_dir: Path) -> dict[str, float]:
    """Serve a state folder whose store is filled, and return how long its lists take."""
    async with _serving(state_dir) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        times = {name: await _median(client, f"/v1/summaries?{query}") for name, query in SEARCHES.items()}
        history = await _median(client, "/v1/runs/long/history?points=100")
        groups = await _median(client, "/v1/runs/long/groups?state=dropped&reason=zero_variance&limit=50")
    return {
        "list_ms_p50": times["newest"],
        "list_worst_ms_p50": max(times.values()),
        "history_ms_p50": history,
        "groups_ms_p50": groups,
        **{f"list_{name}_ms_p50": took for name, took in times.items()},
    }


async def _median(client: httpx.AsyncClient, path: str) -> float:
    times = []
    for _ in range(REQUESTS):
        begun = time.perf_counter()
        answer = await client.get(path)
        times.append((time.perf_counter() - begun) * 1_000)
        answer.raise_for_status()
    return statistics.median(times[1:])


@asynccontextmanager
async def _serving(state_dir: Path) -> AsyncIterator[str]:
    """Serve a state folder without engines, so that nothing but the requests works."""
    address, log = anyio.Path(state_dir / "address"), state_dir / "server.log"
    flags = ["--engine", "none", "--sandbox", "local", "--port", "0", "--port-file", str(address)]
    command = [sys.executable, "-m", "rollout_service.cli", "serve", "--state-dir", str(state_dir), *flags]
    with log.open("wb") as output:
        process = await start_process(command, stdout=output, stderr=output, new_session=True)
    try:
        with anyio.fail_after(START_SECONDS):
            while not await address.exists() or "startup complete" not in log.read_text():
                if process.returncode is not None:
                    raise RuntimeError(f"the service ended: {log.read_text()[-2_000:]}")
                await anyio.sleep(0.05)
        yield (await address.read_text()).strip()
    finally:
        await stop(process)


# -- the store ------------------------------------------------------------------

_ROLLOUT = """
INSERT INTO rollouts (seq, rollout_id, fingerprint, pool, environment, run, group_number, state, attempt, reward,
    stop_reason, code, created_at, queued_at, changed_at, turns, tokens, worked)
VALUES (?, ?, x'00', 'policy', ?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_GROUP = """
INSERT INTO groups (run, number, epoch, state, reason, members, samples, summary, oldest_version, pruned, opened_at,
    changed_at)
VALUES (?, ?, 0, ?, ?, ?, ?, ?, 0, 1, ?, ?)
"""
_RUN = """
INSERT INTO runs (seq, run_id, fingerprint, request, state, version, first_version, tasks, cursor, created_at,
    changed_at)
VALUES (?, ?, x'00', ?, 'ended', 9, 0, 1, ?, ?, ?)
"""
_HISTORY = "INSERT INTO group_history (run, part, records) VALUES (?, ?, ?)"


def fill(path: Path, rollouts: int) -> None:
    """Write a store with so many rollouts, 80 % of them of one run."""
    with closing(Database(path)) as database:
        db = database.connection
        db.execute("PRAGMA synchronous = OFF")
        long = rollouts * 8 // 10 // GROUP_SIZE
        short = rollouts // 10 // SHORT_RUNS // GROUP_SIZE
        groups = [short] * SHORT_RUNS
        groups.insert(SHORT_RUNS // 2, long)
        request = encode_request(
            RunRequest(
                run_id="x", source=InlineTasks(open=True, tasks=[]), batch_size=8, group_size=GROUP_SIZE
            )
        )
        first = 1
        for run, count in enumerate(groups, start=1):
            name = "long" if count == long else f"short-{run}"
            db.execute(_RUN, (run, name, request, count, START, START))
            _fill_run(db, run, name, count, first)
            first += count * GROUP_SIZE
        _fill_rollouts(db, ((f"alone-{n}", None, None) for n in range(first, rollouts + 1)), first)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _fill_run(db: sqlite3.Connection, run: int, name: str, groups: int, first: int) -> None:
    members = (
        (f"{name}.{n // GROUP_SIZE}.{n % GROUP_SIZE}", run, n // GROUP_SIZE)
        for n in range(groups * GROUP_SIZE)
    )
    _fill_rollouts(db, members, first)
    figures = GroupFigures(GROUP_SIZE, 0, 40, 9_000, dict.fromkeys(PHASES, 3.0))
    records: list[bytes] = []
    rows = []
    for number in range(groups):
        reason = "zero_variance" if number % 3 == 0 else None
        ids = [f"{name}.{number}.{sample}" for sample in range(GROUP_SIZE)]
        samples = [ClosedSample(n, one, True, None, 0.5, 0.0) for n, one in enumerate(ids)]
        closure = GroupClosure(number, reason, samples, number % 10 / 10, 0.3, 1, 2, figures=figures)
        at = START + number
        state = "dropped" if reason else "acknowledged"
        rows.append(
            (
                run,
                number,
                state,
                reason,
                json.dumps(ids),
                encode_samples(samples),
                encode_summary(closure),
                at,
                at,
            )
        )
        records.append(encode_record(closure, version=4, now=at))
    parts = range(0, groups, RECORDS_IN_ROW)
    db.execute("BEGIN")
    db.executemany(_GROUP, rows)
    db.executemany(
        _HISTORY, [(run, n // RECORDS_IN_ROW, b"".join(records[n : n + RECORDS_IN_ROW])) for n in parts]
    )
    db.execute("COMMIT")


def _fill_rollouts(
    db: sqlite3.Connection, members: Iterator[tuple[str, int | None, int | None]], first: int
) -> None:
    request = RolloutRequest(
        rollout_id="x", task=Task(environment="math", instance={"question": "1 + 1 = ?" * 9})
    )
    text, result = request.model_dump_json(), encode_result(_result())
    rows: list[tuple[object, ...]] = []

    def write() -> None:
        numbers = [(row[0], text) for row in rows]
        db.execute("BEGIN")
        db.executemany(_ROLLOUT, rows)
        db.executemany("INSERT INTO requests (seq, request) VALUES (?, ?)", numbers)
        db.executemany("INSERT INTO results (seq, result) VALUES (?, ?)", [(n, result) for n, _ in numbers])
        db.execute("COMMIT")
        sys.stderr.write(f"\r{rows[-1][0]:,} rollouts ")
        rows.clear()

    for number, (name, run, group) in enumerate(members, start=first):
        rows.append(_row(number, name, run, group))
        if len(rows) == AT_ONCE:
            write()
    if rows:
        write()


def _row(number: int, name: str, run: int | None, group: int | None) -> tuple[object, ...]:
    at = START + number * 0.1
    state, reward, stop, code = "completed", number % 11 / 10, StopReason.FINISHED.value, None
    if number % 20 == 0:
        rare = number % 100_000 == 0
        code = RARE if rare else CODES[number // 20 % len(CODES)]
        state, reward, stop = "failed", None, StopReason.ERROR.value
    elif number % 101 == 0:
        state, reward, stop = "cancelled", None, StopReason.CANCELLED.value
    environment = ENVIRONMENTS[number % 7 % len(ENVIRONMENTS)]
    where = (environment, run, group, state, reward, stop, code)
    return (number, name, *where, at, at, at + 60, number % 9, number % 4_000, 42.5)


def _result() -> Rollout:
    """Return a result of usual size."""
    now = datetime.fromtimestamp(START, UTC)
    return Rollout(
        rollout_id="x",
        state=RolloutState.COMPLETED,
        task=Task(environment="math", instance={}),
        pool="policy",
        reward=0.5,
        usage=Usage(turns=4, prompt_tokens=9_000, sampled_tokens=900, tool_calls=3),
        spans=[
            Span(stage=stage, attempt=1, started_at=now, queued_seconds=0.1, seconds=9.5) for stage in Stage
        ],
        created_at=now,
    )


def _main() -> None:
    parser = argparse.ArgumentParser(description="Measure the lists of a large store.")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS)
    for name, value in anyio.run(measure, parser.parse_args().rollouts).items():
        print(f"{name:32} {value:12,.1f}")


if __name__ == "__main__":
    _main()
