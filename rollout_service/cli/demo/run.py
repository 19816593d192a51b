"""Runs the demo: starts a server and an engine, rolls out a batch, shows the results, and ends what it started."""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import anyio
from pydantic import JsonValue
from rich.console import Group, RenderableType
from rich.table import Table

from api_schemas.nodes import NodeState
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Sampling, Span, Stage
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_service.cli import common
from rollout_service.cli.console import Heading, SafeConsole, table
from rollout_service.cli.demo import DemoEngine, DemoPolicy, DemoSandbox
from rollout_service.cli.demo.cluster import name_of, running_cluster
from rollout_service.cli.server_child import ServerChild, running_child
from rollout_service.cli.show.trajectory import render_rollout
from rollout_service.cli.submit.files import ResultFile
from rollout_service.cli.submit.progress import ProgressView, Tally
from rollout_service.engines.kinds.embedded.process import EmbeddedEngine
from rollout_service.engines.local_servers.cpu_server import SGLangCpuServer
from rollout_service.engines.shipped import policy_folder
from rollout_service.tokens.errors import InvariantError
from rollout_service.tokens.tokenizer import load_tokenizer
from rollout_service.tokens.trajectory import check_invariants

ENVIRONMENT = "calc"
REQUIRED_SUCCESS_RATE = 0.9
"""The share for the tuned policy; one more rollout may fail, since it samples."""
LOOK_SECONDS = 0.5
ORDERED_AT_ONCE = 256
KILL_AT = 0.3
"""The share of ended rollouts at which a node that works on some is killed."""
KILL_LATEST = 0.6
"""The share at which it is killed anyway."""


@dataclass(frozen=True, slots=True)
class DemoPlan:
    rollouts: int
    sandbox: DemoSandbox
    engine: DemoEngine
    policy: DemoPolicy
    concurrency: int
    temperature: float
    seed: int
    nodes: int = 1
    """With more than one, they share a Redis, and the last one is killed on the way."""
    stay: bool = False


PARTS: tuple[tuple[str, Stage, Callable[[Span], float]], ...] = (
    ("init", Stage.INIT, lambda span: span.seconds),
    ("  sandbox start", Stage.INIT, lambda span: span.sandbox_seconds),
    ("rollout", Stage.ROLLOUT, lambda span: span.seconds),
    ("  engine", Stage.ROLLOUT, lambda span: span.engine_seconds),
    ("  tools", Stage.ROLLOUT, lambda span: span.tool_seconds),
    ("evaluate", Stage.EVALUATE, lambda span: span.seconds),
    ("waiting for workers", Stage.ROLLOUT, lambda span: span.queued_seconds),
)


@dataclass(frozen=True, slots=True)
class Summary:
    rollouts: Sequence[Rollout]
    seconds: float

    @property
    def succeeded(self) -> int:
        return sum(1 for rollout in self.rollouts if rollout.reward is not None and rollout.reward >= 1.0)

    @property
    def failed(self) -> int:
        """The number of rollouts without a result; a wrong answer is a result."""
        return sum(1 for rollout in self.rollouts if rollout.state is not RolloutState.COMPLETED)

    @property
    def success_rate(self) -> float:
        return self.succeeded / len(self.rollouts) if self.rollouts else 0.0

    def figures(self) -> dict[str, float | int | None]:
        return {
            "rollouts": len(self.rollouts),
            "succeeded": self.succeeded,
            "failed": self.failed,
            "success_rate": round(self.success_rate, 4),
            "seconds": round(self.seconds, 3),
            "rollouts_per_second": round(len(self.rollouts) / self.seconds, 3),
        }

    def show(self) -> RenderableType:
        return Group(self._outcome(), self._times())

    def _outcome(self) -> Table:
        usage = [rollout.usage for rollout in self.rollouts]
        prompt, cached = sum(u.prompt_tokens for u in usage), sum(u.cached_tokens for u in usage)
        rows = table("", "", header=False)
        rows.add_row("success", f"{self.succeeded}/{len(self.rollouts)} ({self.success_rate:.1%})")
        rows.add_row("no result", _failures(self.rollouts))
        rows.add_row("turns", f"{sum(u.turns for u in usage)}, {_spread([u.turns for u in usage])} per rollout")
        rows.add_row("tool calls", str(sum(u.tool_calls for u in usage)))
        rows.add_row("prompt tokens", f"{prompt:,}" + (f", {cached / prompt:.1%} cached" if prompt else ""))
        rows.add_row("sampled tokens", f"{sum(u.sampled_tokens for u in usage):,}")
        speed = len(self.rollouts) / self.seconds
        rows.add_row("time", f"{self.seconds:.1f} s, {speed:.2f} rollouts/s")
        return rows

    def _times(self) -> Table:
        rows = table("seconds per rollout", "median", "p95", title="Where the time went")
        for column in rows.columns[1:]:
            column.justify = "right"
        spans = [span for rollout in self.rollouts for span in rollout.spans]
        for name, stage, seconds in PARTS:
            values = [seconds(span) for span in spans if span.stage is stage]
            if values:
                rows.add_row(name, f"{statistics.median(values):.3f}", f"{percentile(values, 95):.3f}")
        return rows


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, interpolated between neighbors."""
    if len(values) == 1:
        return values[0]
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _spread(values: Sequence[int]) -> str:
    return f"{statistics.mean(values):.1f} on average, {max(values)} at most" if values else "none"


def _failures(rollouts: Sequence[Rollout]) -> str:
    codes = Counter(rollout.error.code for rollout in rollouts if rollout.error is not None)
    cancelled = sum(1 for rollout in rollouts if rollout.state is RolloutState.CANCELLED)
    parts = [f"{count} {code}" for code, count in codes.most_common()]
    if cancelled:
        parts.append(f"{cancelled} cancelled")
    return ", ".join(parts) or "0"


async def run_demo(plan: DemoPlan, state_dir: Path | None, output: Path | None, *, quiet: bool) -> tuple[Summary, int]:
    """Return the summary and the exit code; `quiet` prints nothing to stdout."""
    folder = state_dir or Path(tempfile.mkdtemp(prefix="rollout-demo-"))
    batch = output or folder / "batch.jsonl"
    shown = common.err() if quiet else common.out()
    logs = folder / ("server.log" if plan.nodes == 1 else "node-*/server.log")
    common.err().print(f"Starting the server (log: {logs})", soft_wrap=True)
    async with AsyncExitStack() as servers:
        nodes = await servers.enter_async_context(_running(plan, folder))
        client = nodes[0].client
        summary = await _roll_out(plan, nodes, batch)
        model = (await client.backends())[0].model_path
        if not plan.stay:
            await servers.aclose()
        _show(summary, model, shown)
        shown.print(f"batch: {batch}", soft_wrap=True)
        exit_code = _verdict(plan, summary, _find_invalid_trajectories(summary.rollouts))
        if plan.stay:
            await _stay(client)
    return summary, exit_code


async def _stay(client: RolloutClient) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        common.err().print(f"page: {client.base_url}/ (Ctrl-C ends the server)", soft_wrap=True)
        async for _ in signals:
            return


@asynccontextmanager
async def _running(plan: DemoPlan, folder: Path) -> AsyncIterator[Sequence[ServerChild]]:
    """Start an engine and the nodes of the service; only the first is asked."""
    workers, log_level = max(1, plan.concurrency // plan.nodes), "warning" if plan.nodes == 1 else "info"
    flags = ["--sandbox", plan.sandbox, "--rollout-workers", str(workers), "--log-level", log_level]
    async with AsyncExitStack() as stack:
        if plan.engine == "sglang":
            common.err().print("Starting SGLang on the CPU (takes half a minute or more)")
            engine = await stack.enter_async_context(SGLangCpuServer(policy_folder(plan.policy)))
            flags += ["--backend", engine.url]
        elif plan.nodes > 1:
            shared = await stack.enter_async_context(EmbeddedEngine(policy_folder(plan.policy)))
            flags += ["--backend", shared.url]
        else:
            flags += ["--model", plan.policy]
        if plan.nodes > 1:
            yield await stack.enter_async_context(running_cluster(folder, plan.nodes, flags))
        else:
            yield [await stack.enter_async_context(running_child(folder, flags, say=_say))]


def _say(text: str) -> None:
    common.err().print(text, soft_wrap=True)


async def _roll_out(plan: DemoPlan, nodes: Sequence[ServerChild], batch: Path) -> Summary:
    """Run the rollouts; of several nodes, kill the last once some have ended."""
    client, victim = nodes[0].client, nodes[-1] if len(nodes) > 1 else None
    requests = _requests(plan, await client.dataset(ENVIRONMENT, limit=plan.rollouts))
    rollouts: list[Rollout] = []
    tally = Tally(plan.rollouts)
    with ResultFile(batch) as results, ProgressView(common.err(), tally).shown() as view:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, client, view, _stages if victim is None else _nodes)
            async for rollout in client.run_all(requests, concurrency=min(plan.rollouts, ORDERED_AT_ONCE)):
                results.append(rollout)
                rollouts.append(rollout)
                tally.add(rollout)
                view.update()
                if victim is not None and await _is_time_to_kill(client, tally):
                    victim.process.kill()
                    victim = None
                    view.say(f"killed {name_of(len(nodes))} (SIGKILL); its rollouts go to the others")
            tasks.cancel_scope.cancel()
        if len(nodes) > 1:
            view.say(await _nodes(client))
    return Summary(rollouts, time.monotonic() - tally.started)


async def _is_time_to_kill(client: RolloutClient, tally: Tally) -> bool:
    share = tally.count / tally.total
    return share >= KILL_LATEST or (share >= KILL_AT and (await client.nodes())[-1].rollouts > 0)


def _requests(plan: DemoPlan, dataset: list[dict[str, JsonValue]]) -> Iterator[RolloutRequest]:
    """Yield tasks with a seed each, repeating the data set if it is shorter."""
    for number, instance in enumerate(islice(cycle(dataset), plan.rollouts)):
        sampling = Sampling(temperature=plan.temperature, seed=plan.seed + number)
        yield RolloutRequest(task=Task(environment=ENVIRONMENT, instance=instance), sampling=sampling)


async def _watch(client: RolloutClient, view: ProgressView, look: Callable[[RolloutClient], Awaitable[str]]) -> None:
    while True:
        view.update(await look(client))
        await anyio.sleep(LOOK_SECONDS)


async def _stages(client: RolloutClient) -> str:
    counts = (await client.page(limit=1)).counts
    there = [state for state in RolloutState if counts.get(state) and not state.terminal]
    return ", ".join(f"{state}: {counts[state]}" for state in there)


async def _nodes(client: RolloutClient) -> str:
    return ", ".join(
        f"{node.node} dead" if node.state is NodeState.DEAD else f"{node.node} {node.rollouts} ({node.finished} ended)"
        for node in await client.nodes()
    )


def _find_invalid_trajectories(rollouts: Sequence[Rollout]) -> list[str]:
    found = []
    for rollout in rollouts:
        if rollout.trajectory is None:
            if rollout.state is RolloutState.COMPLETED:
                found.append(f"rollout {rollout.rollout_id} completed without a trajectory")
            continue
        try:
            check_invariants(rollout.trajectory)
        except InvariantError as error:
            found.append(f"rollout {rollout.rollout_id}: {error}")
    return found


def _show(summary: Summary, model: str, console: SafeConsole) -> None:
    example = _example(summary.rollouts)
    if example is not None:
        console.print(render_rollout(example, load_tokenizer(model, with_template=False)), soft_wrap=False)
    console.print(Heading())
    console.print(summary.show())


def _example(rollouts: Sequence[Rollout]) -> Rollout | None:
    """Return a rollout to show, preferably one that succeeded with a tool."""
    seen = [rollout for rollout in rollouts if rollout.trajectory is not None]
    good = (rollout for rollout in seen if rollout.usage.tool_calls and (rollout.reward or 0.0) >= 1.0)
    return next(good, seen[0] if seen else None)


def required_successes(rollouts: int) -> int:
    return max(1, int(REQUIRED_SUCCESS_RATE * rollouts) - 1)


def _verdict(plan: DemoPlan, summary: Summary, invalid: list[str]) -> int:
    console = common.err()
    for sentence in invalid:
        console.print(sentence, style="red", soft_wrap=True)
    needed = required_successes(len(summary.rollouts))
    short = plan.policy == "calc-tuned" and summary.succeeded < needed
    if short:
        console.print(f"only {summary.succeeded} rollouts succeeded; {needed} must", style="red")
    if not invalid:
        console.print(f"every trajectory passes the invariants ({len(summary.rollouts)} checked)")
    return 1 if invalid or short else 0


GIBIBYTE = 2**30


def machine() -> dict[str, JsonValue]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / GIBIBYTE, 1),
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def write_figures(
    path: Path | None,
    settings: Mapping[str, JsonValue],
    figures: Mapping[str, float | int | None],
    aims: Mapping[str, str] | None = None,
) -> None:
    """Write figures with settings and machine as JSON, to stdout without a path; aims are texts such as `<= 2`."""
    document = {"machine": machine(), "settings": dict(settings), "figures": dict(figures)}
    if aims:
        document["aims"] = dict(aims)
    if path is None:
        common.print_json(document)
    else:
        path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
