"""Measure the lists of a store with a million rollouts, over HTTP, from a real service that nothing else uses.

The store is filled through its schema, with its triggers, but without a flush per rollout: a million take one minute.
Each figure is the median of the time for a page of 100, from the request to the whole answer: `list_ms_p50` of the
newest rollouts, `list_worst_ms_p50` of the slowest search, and one for each search.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager, closing
from datetime import UTC, datetime
from pathlib import Path

import anyio
import httpx
from common import child, percentile
from support.dashboard.layout import (
    GROUP_SIZE,
    RARE,
    REQUEST,
    RESULT,
    START,
    Layout,
    Member,
    alone,
    layout,
    row,
)
from support.dashboard.redis_lists import SETTINGS, delete_expired, filled_redis
from support.redis_usage import NOTED_SECONDS

from api_schemas.runs import InlineTasks, RunRequest
from rollout_service.groups.statistics import PHASES, GroupFigures
from rollout_service.store.codec.runs import encode_record, encode_request, encode_samples, encode_summary
from rollout_service.store.runs_contract import ClosedSample, GroupClosure
from rollout_service.store.sqlite.connection import Database
from rollout_service.store.sqlite.history import RECORDS_IN_ROW

REQUESTS = 11
"""How often each search is made; the first one, which reads the file, does not count."""
AT_ONCE = 20_000

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
    "reward_in_environment": "environment=swe&reward_min=0.9",
    "error_in_environment": f"environment=swe&error={RARE}",
    "id": "text=short-1.11",
    "no_such_id": "text=nowhere",
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
        times = await _search(client)
        history = await _median(client, "/v1/runs/long/history?points=100")
        groups = await _median(client, "/v1/runs/long/groups?state=dropped&reason=zero_variance&limit=50")
    return times | {"history_ms_p50": history, "groups_ms_p50": groups}


async def measure_redis(rollouts: int) -> dict[str, float]:
    """Do so with a Redis, which has no groups and history of runs."""
    with tempfile.TemporaryDirectory(prefix="lists-", ignore_cleanup_errors=True) as name:
        begun, state_dir = time.perf_counter(), Path(name)
        async with filled_redis(rollouts, state_dir) as server:
            filled, size = time.perf_counter() - begun, (await server.usage()).memory_bytes
            flags = ["--config", str(state_dir / SETTINGS)]
            async with (
                _serving(state_dir, *flags) as url,
                httpx.AsyncClient(base_url=url, timeout=120) as client,
            ):
                await server.note_slow_commands()
                times = await _search(client)
            deleted = await delete_expired(server)
            slow = await server.slow_commands()
    return {
        "list_rollouts": float(rollouts),
        "list_fill_seconds": filled,
        "list_file_mb": size / 1e6,
        "list_deleted": deleted,
        "list_redis_ms_p999": percentile(slow or [NOTED_SECONDS], 0.999) * 1e3,
        "list_redis_ms_max": max(slow, default=NOTED_SECONDS) * 1e3,
        **times,
    }


async def _search(client: httpx.AsyncClient) -> dict[str, float]:
    times = {name: await _median(client, f"/v1/summaries?{query}") for name, query in SEARCHES.items()}
    return {
        "list_ms_p50": times["newest"],
        "list_worst_ms_p50": max(times.values()),
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


def _serving(state_dir: Path, *more: str) -> AbstractAsyncContextManager[str]:
    """Serve a state folder without engines, so that nothing but the requests works."""
    address = state_dir / "address"
    serve = ["-m", "rollout_service.cli", "serve", "--state-dir", str(state_dir), "--engine", "none"]
    serve += ["--sandbox", "local", "--port", "0", "--port-file", str(address), *more]
    return child(serve, address)


# -- the store ------------------------------------------------------------------

_COLUMNS = (
    "seq",
    "rollout_id",
    "environment",
    "run",
    "group_number",
    "state",
    "reward",
    "stop_reason",
    "code",
    "created_at",
    "queued_at",
    "changed_at",
    "turns",
    "tokens",
    "worked",
)
"""The columns of a row."""
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
        request = encode_request(
            RunRequest(run_id="x", source=InlineTasks(open=True, tasks=[]), batch_size=8, group_size=GROUP_SIZE)
        )
        for run in layout(rollouts):
            db.execute(_RUN, (run.number, run.name, request, run.groups, START, START))
            _fill_run(db, run)
        _fill_rollouts(db, alone(rollouts))
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _fill_run(db: sqlite3.Connection, run: Layout) -> None:
    _fill_rollouts(db, run.members())
    figures = GroupFigures(GROUP_SIZE, 0, 40, 9_000, dict.fromkeys(PHASES, 3.0))
    records: list[bytes] = []
    rows = []
    for number in range(run.groups):
        reason = "zero_variance" if number % 3 == 0 else None
        ids = [f"{run.name}.{number}.{sample}" for sample in range(GROUP_SIZE)]
        samples = [ClosedSample(n, one, True, None, 0.5, 0.0) for n, one in enumerate(ids)]
        closure = GroupClosure(number, reason, samples, number % 10 / 10, 0.3, 1, 2, figures=figures)
        at = START + number
        state = "dropped" if reason else "acknowledged"
        rows.append(
            (
                run.number,
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
    parts = range(0, run.groups, RECORDS_IN_ROW)
    db.execute("BEGIN")
    db.executemany(_GROUP, rows)
    db.executemany(
        _HISTORY,
        [(run.number, n // RECORDS_IN_ROW, b"".join(records[n : n + RECORDS_IN_ROW])) for n in parts],
    )
    db.execute("COMMIT")


def _fill_rollouts(db: sqlite3.Connection, members: Iterable[Member]) -> None:
    rows: list[tuple[object, ...]] = []
    insert = f"""
INSERT INTO rollouts (fingerprint, pool, attempt, {", ".join(_COLUMNS)})
VALUES (x'00', 'policy', 1{", ?" * len(_COLUMNS)})
"""

    def write() -> None:
        numbers = [(row[0], REQUEST) for row in rows]
        db.execute("BEGIN")
        db.executemany(insert, rows)
        db.executemany("INSERT INTO requests (seq, request) VALUES (?, ?)", numbers)
        db.executemany("INSERT INTO results (seq, result) VALUES (?, ?)", [(n, RESULT) for n, _ in numbers])
        db.execute("COMMIT")
        sys.stderr.write(f"\r{rows[-1][0]:,} rollouts ")
        rows.clear()

    for member in members:
        rows.append(row(member))
        if len(rows) == AT_ONCE:
            write()
    if rows:
        write()


STORES = {"sqlite": measure, "redis": measure_redis}
"""What measures the lists, by the kind of the store."""
