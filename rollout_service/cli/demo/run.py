"""Runs the demo: starts a server and an engine, rolls out a batch, and shows the results.

Guarantee: the server and the engine have ended when it returns.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path

import anyio
from pydantic import JsonValue
from rich.console import Group, RenderableType
from rich.table import Table

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Sampling, Span, Stage
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_service.cli import common
from rollout_service.cli.console import Heading, SafeConsole, table
from rollout_service.cli.demo import DemoEngine, DemoPolicy, DemoSandbox
from rollout_service.cli.demo.cluster import KILL_AT, KILL_LATEST, ClusterView, DemoCluster, running_cluster
from rollout_service.cli.server_child import running_server
from rollout_service.cli.show.trajectory import render_rollout
from rollout_service.cli.submit.files import ResultFile
from rollout_service.cli.submit.progress import ProgressView, Tally
from rollout_service.engines.kinds.embedded.process import EmbeddedEngine
from rollout_service.engines.local_servers.cpu_server import SGLangCpuServer
from rollout_service.engines.local_servers.process import ServerProcess
from rollout_service.engines.shipped import policy_folder
from rollout_service.tokens.errors import InvariantError
from rollout_service.tokens.tokenizer import load_tokenizer
from rollout_service.tokens.trajectory import check_invariants

ENVIRONMENT = "calc"
REQUIRED_SUCCESS_RATE = 0.9
"""The share of rollouts of the tuned policy that must succeed; one more may fail, since it samples."""
LOOK_SECONDS = 0.5
ORDERED_AT_ONCE = 256


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
    """Whether the server stays up after the results, until Ctrl-C, to be looked at."""


# The summary of a batch of rollouts: successes, turns, tokens, and where the time went.

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
        """The number of rollouts with a reward of 1 or more."""
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
        rows.add_row(
            "turns", f"{sum(u.turns for u in usage)}, {_spread([u.turns for u in usage])} per rollout"
        )
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
    """Return a percentile, interpolated between neighbors; of a single value, the value itself."""
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


@dataclass(frozen=True, slots=True)
class DemoResult:
    plan: DemoPlan
    summary: Summary
    exit_code: int

    def write(self, file: Path | None) -> None:
        if file is None:
            common.print_json(figures_document(asdict(self.plan), self.summary.figures()))
        else:
            write_figures(file, asdict(self.plan), self.summary.figures())


async def run_demo(
    plan: DemoPlan, state_dir: Path | None, output: Path | None, *, quiet: bool = False
) -> DemoResult:
    """Run the plan, show the results, and write the batch; with `quiet`, print nothing to stdout."""
    folder = state_dir or Path(tempfile.mkdtemp(prefix="rollout-demo-"))
    batch = output or folder / "batch.jsonl"
    console = common.err()
    logs = folder / ("server.log" if plan.nodes == 1 else "node-*/server.log")
    console.print(f"Starting the server (log: {logs})", soft_wrap=True)
    async with AsyncExitStack() as servers:
        if plan.nodes > 1:
            cluster = await servers.enter_async_context(_cluster(plan, folder))
            client = cluster.client
            summary = await _roll_out_over_nodes(plan, cluster, batch)
        else:
            client = await servers.enter_async_context(_serving(plan, folder))
            summary = await _roll_out(plan, client, batch)
        model = (await client.backends())[0].model_path
        if not plan.stay:
            await servers.aclose()
        result = _conclude(plan, summary, model, batch, common.err() if quiet else common.out())
        if plan.stay:
            await _stay(client)
    return result


def _conclude(plan: DemoPlan, summary: Summary, model: str, batch: Path, shown: SafeConsole) -> DemoResult:
    invalid = _find_invalid_trajectories(summary.rollouts)
    _show(summary, model, shown)
    shown.print(f"batch: {batch}", soft_wrap=True)
    return DemoResult(plan, summary, _verdict(plan, summary, invalid))


async def _stay(client: RolloutClient) -> None:
    """Keep the server up until Ctrl-C or SIGTERM, and say where its page is."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        common.err().print(f"page: {client.base_url}/ (Ctrl-C ends the server)", soft_wrap=True)
        async for _ in signals:
            return


@asynccontextmanager
async def _serving(plan: DemoPlan, folder: Path) -> AsyncIterator[RolloutClient]:
    flags = ["--sandbox", plan.sandbox, "--rollout-workers", str(plan.concurrency), "--log-level", "warning"]
    if plan.engine is DemoEngine.EMBEDDED:
        async with running_server(folder, [*flags, "--model", plan.policy], say=_say) as client:
            yield client
        return
    common.err().print("Starting SGLang on the CPU (takes half a minute or more)")
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(SGLangCpuServer(policy_folder(plan.policy)))
        flags += ["--backend", engine.url]
        yield await stack.enter_async_context(running_server(folder, flags, say=_say))


def _say(text: str) -> None:
    common.err().print(text, soft_wrap=True)


@asynccontextmanager
async def _cluster(plan: DemoPlan, folder: Path) -> AsyncIterator[DemoCluster]:
    flags = ["--sandbox", plan.sandbox, "--rollout-workers", str(max(1, plan.concurrency // plan.nodes))]
    flags += ["--log-level", "info"]
    async with AsyncExitStack() as stack:
        engine = _engine(plan)
        url = (await stack.enter_async_context(engine)).url
        yield await stack.enter_async_context(running_cluster(folder, plan.nodes, [*flags, "--backend", url]))


def _engine(plan: DemoPlan) -> ServerProcess:
    folder = policy_folder(plan.policy)
    return EmbeddedEngine(folder) if plan.engine is DemoEngine.EMBEDDED else SGLangCpuServer(folder)


async def _roll_out_over_nodes(plan: DemoPlan, cluster: DemoCluster, batch: Path) -> Summary:
    """Run the rollouts, and kill the last node once some of them have ended."""
    client = cluster.client
    requests = _requests(plan, await client.dataset(ENVIRONMENT, limit=plan.rollouts))
    rollouts: list[Rollout] = []
    tally = Tally(plan.rollouts)
    view = ClusterView(common.err(), tally)
    is_alive = True
    with ResultFile(batch) as results:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(view.shown, client)
            async for rollout in client.run_all(requests, concurrency=min(plan.rollouts, ORDERED_AT_ONCE)):
                results.append(rollout)
                rollouts.append(rollout)
                tally.add(rollout)
                share = tally.count / plan.rollouts
                if is_alive and (share >= KILL_LATEST or (share >= KILL_AT and view.is_last_busy)):
                    is_alive = False
                    view.say(f"killed {cluster.kill_last()} (SIGKILL); its rollouts go to the others")
            tasks.cancel_scope.cancel()
    view.nodes = await client.nodes()
    view.say(view.line())
    return Summary(rollouts, time.monotonic() - tally.started)


async def _roll_out(plan: DemoPlan, client: RolloutClient, batch: Path) -> Summary:
    requests = _requests(plan, await client.dataset(ENVIRONMENT, limit=plan.rollouts))
    rollouts: list[Rollout] = []
    tally = Tally(plan.rollouts)
    with ResultFile(batch) as results, ProgressView(common.err(), tally).shown() as view:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch_stages, client, view)
            async for rollout in client.run_all(requests, concurrency=min(plan.rollouts, ORDERED_AT_ONCE)):
                results.append(rollout)
                rollouts.append(rollout)
                tally.add(rollout)
                view.update()
            tasks.cancel_scope.cancel()
    return Summary(rollouts, time.monotonic() - tally.started)


def _requests(plan: DemoPlan, dataset: list[dict[str, JsonValue]]) -> Iterator[RolloutRequest]:
    """Yield the requested number of tasks, each with its own seed, repeating the data set if it is shorter."""
    for number, instance in enumerate(islice(cycle(dataset), plan.rollouts)):
        sampling = Sampling(temperature=plan.temperature, seed=plan.seed + number)
        yield RolloutRequest(task=Task(environment=ENVIRONMENT, instance=instance), sampling=sampling)


async def _watch_stages(client: RolloutClient, view: ProgressView) -> None:
    """Show how many rollouts are in each stage, until cancelled."""
    while True:
        counts = (await client.page(limit=1)).counts
        there = [state for state in RolloutState if counts.get(state) and not state.terminal]
        view.update(", ".join(f"{state}: {counts[state]}" for state in there))
        await anyio.sleep(LOOK_SECONDS)


def _find_invalid_trajectories(rollouts: Sequence[Rollout]) -> list[str]:
    """Return a sentence for each trajectory that violates an invariant."""
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
    """Return a rollout to show: one that succeeded with a tool, otherwise the first that has a trajectory."""
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
    short = plan.policy is DemoPolicy.TUNED and summary.succeeded < needed
    if short:
        console.print(f"only {summary.succeeded} rollouts succeeded; {needed} must", style="red")
    if not invalid:
        console.print(f"every trajectory passes the invariants ({len(summary.rollouts)} checked)")
    return 1 if invalid or short else 0


# The document that `demo --json` and the benchmarks write: figures, with their settings and machine.

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


def figures_document(
    settings: Mapping[str, JsonValue],
    figures: Mapping[str, float | int | None],
    aims: Mapping[str, str] | None = None,
) -> dict[str, JsonValue]:
    """Return `{"machine", "settings", "figures"}`, and `"aims"` if there are any.

    Figures are a flat mapping to numbers, or null if there is none. Aims are texts such as `<= 2`, by their figures.
    """
    found: dict[str, JsonValue] = {"settings": dict(settings), "figures": dict(figures)}
    return {"machine": machine()} | found | ({"aims": dict(aims)} if aims else {})


def write_figures(
    path: Path,
    settings: Mapping[str, JsonValue],
    figures: Mapping[str, float | int | None],
    aims: Mapping[str, str] | None = None,
) -> None:
    document = figures_document(settings, figures, aims)
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
