"""Measure snapshots of sandboxes, what a group of rollouts saves that starts from one, and pauses.

Run: python benchmarks/snapshots.py [--json FILE] [--quick | --smoke]

Real Apptainer with the base image and this project's defaults; as an ordinary user if one runs it. The prepared files
are 10,000 of 20 KB (in the small sizes fewer).

- `snapshot_ms_p50`: from the call until the sandbox has ended and others can start from its files.
- `start_ms_p50`, `fork_ms_p50`: from the call that starts a sandbox until bash is open in it, from the image and from
  the snapshot; `fork_ratio` is the second over the first. `fork_both_ms_p50`: until Python is open too. `copy_ms_p50`:
  the time that the same files take as a tar archive out of one sandbox and into another, which is the way without
  snapshots.
- `save_empty_ms_p50`, `save_ms_p50`: how long it takes to save a running sandbox to a file, before it has the files and
  with them. `start_from_saved_ms_p50`: from the call that starts a sandbox from the latter until bash is open in it.
- `children_seconds`: 16 sandboxes from one snapshot, started at once, until bash is open in all; `children_4_seconds`
  and `children_64_seconds` are of as many. `children_both_seconds`: of 16, until Python is open too.
- `group_start_seconds`, `group_start_shared_seconds`: a group of 16 trials of one task, from the first to the last
  answer of an agent that answers at once; its `init` uses `init_seconds` of a processor. Each
  prepares for itself, or all share. `group_start_ratio` is the second over the first.
- `group_memory_mb`, `group_memory_shared_mb`: what the prepared files of 16 sandboxes take up in memory.
- `running_mb`, `paused_mb`: the memory of the processes of a sandbox with a Python session of 100 MB before a pause,
  and during one that has given memory back; a shared page counts once. The setting `pausing` has the reason: the
  session's data goes only with `memory`, for which the host needs swap. `given_back_mb` counts the page cache too.
- `freeze_ms_p50`, `thaw_ms_p50`: how long a pause takes to begin, and by how much it delays the call that ends it.
- `leftovers`: folders and mounts that are left at the end.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil
from common import Options, folder_kept_on_error, report, run

from rollout_service.environments.declarative.environment import load_folder
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.shared_setup import SharedSetups
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy
from sandboxes import (
    ApptainerConfig,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    SessionName,
    Snapshot,
    make_provider,
)
from sandboxes.sessions.serial_session import open_sessions

CHILDREN = 16
BASH, BOTH = frozenset[SessionName]({"bash"}), frozenset[SessionName]({"bash", "python"})
PAUSE_FIGURES = ("running_mb", "paused_mb", "given_back_mb", "freeze_ms_p50", "thaw_ms_p50")
FILL = (
    "mkdir -p /workspace/files && cd /workspace/files && head -c 20000 /dev/urandom >0 && "
    "for ((n = 1; n < {files}; n++)); do cp 0 $n; done"
)
TOML = """
name = "prepared"
image = "base"
tools = ["bash"]
[init]
command = '''bash -c "ulimit -t {seconds}; while :; do :; done" || true; {fill}'''
shared = {shared}
[evaluate]
command = 'echo "{{\\"reward\\": 1}}" >"$ROLLOUT_RESULT"'
sandbox = "same"
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """The amount of work."""

    files: int
    times: int
    init_seconds: int
    trials: int


@asynccontextmanager
async def _provider(folder: Path) -> AsyncIterator[SandboxProvider]:
    provider = make_provider(ApptainerConfig(run_dir=folder / "run"), folder / "state")
    try:
        yield provider
    finally:
        await provider.close()


async def _fill(sandbox: Sandbox, files: int) -> None:
    done = await sandbox.exec(["bash", "-c", FILL.format(files=files)], timeout=120)
    if done.exit_code != 0:
        raise RuntimeError(done.stderr.decode())


async def _start(
    provider: SandboxProvider,
    snapshot: Snapshot | None = None,
    saved: Path | None = None,
    sessions: Collection[SessionName] = BASH,
) -> tuple[Sandbox, float]:
    """Start a sandbox and open its sessions; return it, and the milliseconds that this took."""
    begun = time.perf_counter()
    sandbox = await provider.start(SandboxSpec(image="base", snapshot=snapshot, saved=saved))
    await open_sessions(sandbox, sessions)
    return sandbox, 1000 * (time.perf_counter() - begun)


async def _copy(provider: SandboxProvider, source: Sandbox) -> float:
    """Copy the prepared files into a new sandbox; return the milliseconds that this took."""
    async with await provider.start(SandboxSpec(image="base")) as target:
        begun = time.perf_counter()
        await target.import_path("/workspace", source.export_path("/workspace/files"))
        return 1000 * (time.perf_counter() - begun)


async def _save(sandbox: Sandbox, path: Path) -> float:
    """Save a sandbox to a file; return the milliseconds that this took."""
    begun = time.perf_counter()
    with path.open("wb") as file:
        async with aclosing(sandbox.save()) as parts:
            async for part in parts:
                file.write(part)
    return 1000 * (time.perf_counter() - begun)


async def _measure_saving(provider: SandboxProvider, plan: Plan, folder: Path) -> dict[str, float]:
    empty, full, starts, path = [], [], [], folder / "saved"
    for _ in range(plan.times):  # before the files of others are freed, which keeps the processors busy
        first, _ = await _start(provider)
        await (await first.bash()).run(":")  # an open shell may still be setting itself up
        empty.append(await _save(first, path))
        await first.close()
    for _ in range(plan.times):
        first, _ = await _start(provider)
        await _fill(first, plan.files)
        full.append(await _save(first, path))
        await first.close()
        sandbox, took = await _start(provider, saved=path)
        starts.append(took)
        await sandbox.close()
    return {
        "save_empty_ms_p50": statistics.median(empty),
        "save_ms_p50": statistics.median(full),
        "start_from_saved_ms_p50": statistics.median(starts),
    }


async def _measure_snapshots(provider: SandboxProvider, plan: Plan) -> dict[str, float]:
    plain, snapshots, copies = [], [], []
    forks: dict[Collection[SessionName], list[float]] = {BASH: [], BOTH: []}
    for _ in range(plan.times):
        first, took = await _start(provider)
        plain.append(took)
        await _fill(first, plan.files)
        copies.append(await _copy(provider, first))
        begun = time.perf_counter()
        snapshot = await first.snapshot()
        snapshots.append(1000 * (time.perf_counter() - begun))
        for sessions in (BASH, BOTH) * 3:
            sandbox, took = await _start(provider, snapshot, sessions=sessions)
            forks[sessions].append(took)
            await sandbox.close()
        await snapshot.close()
    return {
        "snapshot_ms_p50": statistics.median(snapshots),
        "start_ms_p50": statistics.median(plain),
        "fork_ms_p50": statistics.median(forks[BASH]),
        "fork_ratio": statistics.median(forks[BASH]) / statistics.median(plain),
        "fork_both_ms_p50": statistics.median(forks[BOTH]),
        "copy_ms_p50": statistics.median(copies),
    }


def _memory() -> int:
    """Return the bytes of files in memory on this host."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return 1024 * int(lines["Shmem"].split()[0])


async def _start_children(
    provider: SandboxProvider, snapshot: Snapshot, count: int, sessions: Collection[SessionName] = BASH
) -> tuple[float, int]:
    """Start sandboxes at once; return the seconds until all are open, and the bytes of files in memory by then."""
    async with AsyncExitStack() as stack:

        async def start() -> None:
            sandbox, _ = await _start(provider, snapshot, sessions=sessions)
            stack.push_async_callback(sandbox.close)

        begun = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(count):
                tasks.start_soon(start)
        return time.perf_counter() - begun, _memory()


async def _measure_children(provider: SandboxProvider, plan: Plan) -> dict[str, float]:
    before = _memory()
    first, _ = await _start(provider)
    await _fill(first, plan.files)
    one = _memory() - before
    snapshot = await first.snapshot()
    seconds, memory = await _start_children(provider, snapshot, CHILDREN)
    figures = {
        "children_seconds": seconds,
        "children_4_seconds": (await _start_children(provider, snapshot, 4))[0],
        "children_64_seconds": (await _start_children(provider, snapshot, 64))[0],
        "children_both_seconds": (await _start_children(provider, snapshot, CHILDREN, BOTH))[0],
        "group_memory_mb": CHILDREN * one / 1e6,
        "group_memory_shared_mb": (memory - before) / 1e6,
    }
    await snapshot.close()
    return figures


async def _group(provider: SandboxProvider, folder: Path, plan: Plan, *, shared: bool) -> float:
    """Play a group of trials of one task at once; return the seconds until the last has ended."""
    await anyio.Path(folder).mkdir()
    fill = FILL.format(files=plan.files // 10)
    toml = TOML.format(seconds=plan.init_seconds, fill=fill, shared=str(shared).lower())
    await anyio.Path(folder / "environment.toml").write_text(toml)
    environment, source = load_folder(folder), SandboxSource(provider)
    setups = SharedSetups()

    async def one() -> None:
        policy = ScriptedPolicy(["Done."])
        await play(environment, {"question": "?"}, policy, source, setups=setups)

    async with setups.running():
        begun = time.perf_counter()
        async with anyio.create_task_group() as tasks:
            for _ in range(plan.trials):
                tasks.start_soon(one)
        return time.perf_counter() - begun


def _memory_of(sandbox: Sandbox) -> float:
    """Return the megabytes of memory that the processes of a sandbox take up."""
    launcher = psutil.Process(sandbox.pid)
    return sum(process.memory_full_info().pss for process in launcher.children(recursive=True)) / 1e6


async def _measure_pauses(provider: SandboxProvider, plan: Plan) -> dict[str, float | None]:
    if provider.pausing == "none":
        return dict.fromkeys(PAUSE_FIGURES)
    async with await provider.start(SandboxSpec(image="base")) as sandbox:
        bash, python = await sandbox.bash(), await sandbox.python()
        await python.execute("data = b'x' * 100_000_000")
        freezes, thaws = [], []
        for _ in range(10 * plan.times):
            begun = time.perf_counter()
            await bash.run(":")
            running = time.perf_counter()
            await sandbox.pause()
            paused = time.perf_counter()
            await bash.run(":")
            freezes.append(1000 * (paused - running))
            thaws.append(1000 * (time.perf_counter() - paused - (running - begun)))
        running_mb = _memory_of(sandbox)
        await sandbox.pause()
        given_back = await sandbox.reclaim() / 1e6
        found = (
            running_mb,
            _memory_of(sandbox),
            given_back,
            statistics.median(freezes),
            statistics.median(thaws),
        )
        return dict(zip(PAUSE_FIGURES, found, strict=True))


def _left(folder: Path) -> int:
    mounts = Path("/proc/self/mounts").read_text().count(str(folder))
    return mounts + sum(1 for _ in (folder / "run").iterdir())


async def main(given: Options) -> None:
    plan = given.plan(Plan(10_000, 7, 5, CHILDREN), Plan(3_000, 3, 2, CHILDREN), Plan(50, 1, 1, 2))
    with folder_kept_on_error("snapshots-") as folder:
        async with _provider(folder) as provider:
            figures: dict[str, float | None] = dict(await _measure_saving(provider, plan, folder))
            figures |= await _measure_snapshots(provider, plan)
            figures |= await _measure_children(provider, plan)
            figures |= await _measure_pauses(provider, plan)
            pausing = provider.pausing
            alone = await _group(provider, folder / "alone", plan, shared=False)
            together = await _group(provider, folder / "together", plan, shared=True)
        figures |= {
            "init_seconds": plan.init_seconds,
            "group_start_seconds": alone,
            "group_start_shared_seconds": together,
            "group_start_ratio": together / alone,
            "leftovers": _left(folder),
        }
    report(
        "Snapshots",
        given,
        {"user": "root" if os.geteuid() == 0 else "ordinary", "files": plan.files, "pausing": pausing},
        figures,
        {
            "snapshot_ms_p50": "<= 10",
            "fork_ms_p50": "<= 25",
            "fork_both_ms_p50": "<= 130",
            "children_seconds": "<= 0.2",
            "children_both_seconds": "<= 2",
            "group_start_ratio": "<= 0.15",
            "leftovers": "0",
        },
    )


if __name__ == "__main__":
    run(main, "Measure snapshots of sandboxes.")
