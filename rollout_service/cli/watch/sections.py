"""The parts of the full-screen view; problems come first, and a part of which nothing is known is left out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from api_schemas.nodes import StageOverview
from api_schemas.rollouts import RolloutState
from api_schemas.rollouts.figures import ParallelFigures, RunParallel
from api_schemas.rollouts.trees import InvalidBecause
from api_schemas.views.hangs import HangFinding
from api_schemas.views.overview import BackendOverview, Bottleneck, NextNode, Overview, RunOverview
from rollout_service.cli.common import count
from rollout_service.cli.console import HANG_STYLES, id_column, table

SHOWN_FINDINGS, SHOWN_ERRORS, SHOWN_ROWS = 5, 4, 8
BAR_WIDTH = 20


def all_of(overview: Overview) -> Iterator[RenderableType | None]:
    yield head(overview)
    yield findings(overview.findings)
    yield pipeline(overview.stages)
    yield limit(overview.bottleneck, overview.next_node)
    yield failures(overview)
    yield engines(overview.backends, overview.paused_pools)
    yield nodes(overview)
    yield runs(overview.runs)


def head(overview: Overview) -> RenderableType:
    line = Text(f"{overview.node}  {overview.version}  up {duration(overview.uptime_seconds)}  ", no_wrap=True)
    line.append("ready" if overview.ready else "takes no work", "green" if overview.ready else "bold red")
    line.append(f"  {overview.finished_per_second:.1f} rollouts/s")
    if overview.success_share is not None:
        style = "" if overview.success_share > 0.5 else "yellow"
        line.append(f"  {overview.success_share:.0%} succeed", style)
    if overview.sessions_open:
        line.append(f"  {count(overview.sessions_open, 'live session')}")
    states = [f"{overview.counts[state]:,} {state}" for state in RolloutState if overview.counts.get(state)]
    reasons = [Text(reason, style="bold red") for reason in overview.reasons]
    warnings = [Text(warning, style="yellow") for warning in overview.warnings]
    return Group(line, Text(", ".join(states) or "no rollouts yet", style="dim"), *reasons, *warnings)


def findings(found: Iterable[HangFinding]) -> RenderableType | None:
    all_found = list(found)
    lines = []
    for one in all_found[:SHOWN_FINDINGS]:
        who = f" ({count(one.count, 'rollout')})" if one.count else ""
        text = Text(f"{one.verdict.upper()} for {duration(one.seconds)}{who}: {one.message}", HANG_STYLES[one.verdict])
        lines.append(text.append(f" {one.hint}", "not bold dim"))
    if len(all_found) > SHOWN_FINDINGS:
        lines.append(Text(f"and {len(all_found) - SHOWN_FINDINGS} more: rollout-service doctor --live", "dim"))
    return Group(*lines) if lines else None


def pipeline(stages: Iterable[StageOverview]) -> RenderableType:
    rows = table("stage", "working", "", "waiting", "oldest", "wait for")
    for one in stages:
        ordered = sorted(one.waits_for.items(), key=lambda pair: -pair[1])
        waits = ", ".join(f"{number} {kind}" for kind, number in ordered)
        working = f"{one.working}/{one.workers}"
        waiting = f"{one.waiting}/{one.places}"
        rows.add_row(one.stage, working, bar(one.working, one.workers), waiting, duration(one.oldest_seconds), waits)
    return rows


def limit(found: Bottleneck | None, more: NextNode | None) -> RenderableType | None:
    if found is None and more is None:
        return None
    line = Text() if found is None else Text(f"bottleneck: {found.kind}. {found.message} ", "cyan")
    line.append("" if found is None else f"{found.hint} ", "dim")
    return line.append("" if more is None else more.message, "cyan" if more and more.rollouts else "dim")


def failures(overview: Overview) -> RenderableType | None:
    ended = sorted(overview.outcomes.items(), key=lambda pair: -pair[1])
    lines = [Text("last 5 minutes: " + ", ".join(f"{number} {name}" for name, number in ended))] if ended else []
    for one in overview.errors[:SHOWN_ERRORS]:
        where = f" in {one.stage}" if one.stage else ""
        text = Text(f"{one.count} x {one.code} ({one.boundary}{where}) ", "red", no_wrap=True, overflow="ellipsis")
        lines.append(text.append(one.message.partition("\n")[0], "dim"))
    return Group(*lines) if lines else None


def engines(backends: list[BackendOverview], paused: list[str]) -> RenderableType:
    rows = table(id_column("engine"), "state", "version", "in flight", "req/s", "tokens/s", "cached", "p50")
    for one in backends[:SHOWN_ROWS]:
        backend = one.backend
        rows.add_row(
            backend.backend_id,
            Text(backend.state, "" if backend.state == "ready" else "yellow"),
            str(backend.weight_version),
            str(backend.in_flight),
            f"{one.requests_per_second:.1f}",
            f"{one.tokens_per_second:,.0f}",
            "-" if one.cached_share is None else f"{one.cached_share:.0%}",
            "-" if one.p50_seconds is None else duration(one.p50_seconds),
        )
    lines: list[RenderableType] = [rows] if backends else [Text("no engines are registered", "bold red")]
    lines += [Text(f"the pool {pool} is paused", "cyan") for pool in paused]
    return Group(*lines, *_more(len(backends)))


def nodes(overview: Overview) -> RenderableType | None:
    if not overview.nodes:
        return None
    rows = table(id_column("node"), "state", "rollouts", "sandboxes", "", "warm", "waiting")
    for one in overview.nodes[:SHOWN_ROWS]:
        rows.add_row(
            one.node,
            one.state,
            str(one.rollouts),
            f"{one.in_use}/{one.target}",
            bar(one.in_use, one.target),
            str(one.warm),
            str(one.waiting),
        )
    holds = (f"{one.node} holds back: {hold.reason}" for one in overview.nodes for hold in one.holds)
    return Group(rows, *(Text(hold, "cyan") for hold in holds), *_more(len(overview.nodes)))


def runs(found: list[RunOverview]) -> RenderableType | None:
    if not found:
        return None
    rows = table(id_column("run"), "state", "version", "open", "ready", "trained", "dropped", "kept", "behind")
    for one in found[:SHOWN_ROWS]:
        rows.add_row(
            one.run_id,
            Text(one.state, "bold red" if one.problem else ""),
            str(one.version),
            *map(str, (one.open_groups, one.ready_groups, one.acknowledged_groups, sum(one.dropped.values()))),
            f"{one.acceptance_rate:.0%}",
            "-" if one.staleness is None else f"{one.staleness:g}",
        )
    problems = (Text(f"{one.run_id}: {one.problem}", "red") for one in found if one.problem)
    return Group(rows, *problems, *_more(len(found)))


def bar(number: float, most: float) -> Text:
    share = min(1.0, number / most) if most else 0.0
    filled = round(share * BAR_WIDTH)
    return Text("█" * filled, "green").append("░" * (BAR_WIDTH - filled), "dim")


def duration(seconds: float) -> str:
    for unit, name in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def _more(number: int) -> list[Text]:
    return [Text(f"and {number - SHOWN_ROWS} more", "dim")] if number > SHOWN_ROWS else []


# How the rollouts of a run use sub-agents: each figure next to the failure that it shows.

SIGNS: dict[str, tuple[str, ...]] = {
    "serial": (
        "assign_rate",
        "delegate_ratio",
        "assigns_per_turn",
        "width_mean",
        "width_max",
        "critical/total",
    ),
    "spurious": ("assigns_per_rollout", "duplicate_share", "over_cap_share", "abandoned_share"),
    "one big branch": ("balance", "straggler_seconds", "eta"),
    "useless sub-agents": ("finish_rate", "invalid", "refused_share"),
    "waste": ("subagent_tokens", "tokens_per_solved", "result_chars_per_assign"),
    "latency": (
        "critical_steps",
        "scheduled_steps",
        "total_steps",
        "speedup",
        "critical_seconds",
        "queued_seconds",
    ),
    "outcome": ("rollouts", "perf"),
}


def render_parallel(parallel: RunParallel) -> Table:
    columns = ["so far"] if parallel.recent is None else ["so far", f"last {parallel.recent.rollouts}"]
    rows = table("shows", "figure", *columns)
    for sign, names in SIGNS.items():
        for name in names:
            both = (parallel.total, parallel.recent)
            rows.add_row(sign, name, *(_shown(one, name) for one in both if one is not None))
    return rows


def _shown(figures: ParallelFigures, name: str) -> str:
    if name == "critical/total":
        return _number(None if figures.speedup is None else 1 / figures.speedup)
    if name == "invalid":
        return "-" if figures.invalid is None else _by_share(figures.invalid)
    return _number(getattr(figures, name))


def _by_share(shares: Mapping[InvalidBecause, float]) -> str:
    largest_first = sorted(shares, key=lambda one: (-shares[one], one))
    return ", ".join(f"{reason} {shares[reason]:.2f}" for reason in largest_first) or "none"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:,.2f}"
