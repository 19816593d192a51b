"""`rollout-service runs groups` and `runs history`: a run's groups one by one, and how it went over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rollout_service.cli import common, completion
from rollout_service.cli.common import DEFAULT_URL, AsJson, Key, Url

if TYPE_CHECKING:
    from api_schemas.runs.history import GroupRow, RunHistory

GroupState = Literal["open", "ready", "batched", "acknowledged", "dropped"]
RunId = Annotated[str, typer.Argument(help="The run's id, from `runs list`.", autocompletion=completion.runs)]


def register(app: typer.Typer) -> None:
    app.command("groups", epilog="Example: rollout-service runs groups dapo-7b --state dropped")(groups)
    app.command("history", epilog="Example: rollout-service runs history dapo-7b --json")(history)


@common.command
async def groups(
    run_id: RunId,
    state: Annotated[GroupState | None, typer.Option(help="Show only groups in this state.")] = None,
    reason: Annotated[
        str | None, typer.Option(help="Show only groups that were dropped for this reason.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many groups to show.")] = 20,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show a run's groups, those that started last first, with the rewards of their samples."""
    found: list[GroupRow] = []
    async with common.connect(url, key) as client:
        async for group in client.open_run(run_id).groups(state=state, reason=reason):
            found.append(group)
            if len(found) == limit:
                break
    _show_groups(found, as_json)


@common.command
async def history(
    run_id: RunId,
    points: Annotated[int, typer.Option(min=1, max=1_000, help="The most intervals to show.")] = 20,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show how a run went, in intervals of closed groups, the oldest first."""
    async with common.connect(url, key) as client:
        _show_history(await client.open_run(run_id).history(points=points), as_json)


def _show_groups(found: list[GroupRow], as_json: bool) -> None:
    if as_json:
        common.print_json([group.model_dump(mode="json") for group in found])
        return
    from rollout_service.cli.console import id_column, table

    rows = table(id_column("group"), "state", "reason", "batch", "mean", "rewards")
    for group in found:
        rewards = " ".join(_number(one.reward) for one in group.samples)
        batch = "-" if group.batch is None else str(group.batch)
        mean = _number(group.reward_mean)
        rows.add_row(str(group.number), group.state, group.reason or "-", batch, mean, rewards or "-")
    common.out().print(rows if found else "There are no such groups.")


def _show_history(found: RunHistory, as_json: bool) -> None:
    if as_json:
        common.print_json(found.model_dump(mode="json"))
        return
    from rollout_service.cli.console import table

    columns = (found.reward_mean, found.acceptance, found.staleness, found.turns, found.tokens, found.failed)
    rows = table("until", "groups", "reward", "kept", "stale", "turns", "tokens", "failed", "dropped")
    for place, at in enumerate(found.at):
        dropped = [f"{counts[place]} {reason}" for reason, counts in found.dropped.items() if counts[place]]
        numbers = (_number(column[place]) for column in columns)
        rows.add_row(f"{at:%Y-%m-%d %H:%M:%S}", str(found.groups[place]), *numbers, ", ".join(dropped) or "0")
    common.out().print(rows if found.at else "No group of the run has closed yet.")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
