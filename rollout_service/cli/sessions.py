"""`rollout-service sessions`: list, show, judge and delete the live sessions of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common, completion
from rollout_service.cli.common import DEFAULT_URL, AsJson, Key, Url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from api_schemas.sessions import DeletedSessions, LiveSession, SessionCounts

app = typer.Typer(
    name="sessions",
    help="List, show, judge and delete live sessions.",
    no_args_is_help=True,
)

SessionId = Annotated[
    str, typer.Argument(help="The session's id, from `sessions list`.", autocompletion=completion.sessions)
]


@app.command("list", epilog="Example: rollout-service sessions list --json")
@common.command
async def list_sessions(
    limit: Annotated[int, typer.Option(min=1, help="The most sessions to show.")] = 100,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show sessions, the newest first, with the numbers of their turns."""
    from contextlib import aclosing

    shown: list[LiveSession] = []
    async with common.connect(url, key) as client, aclosing(client.sessions()) as sessions:
        async for session in sessions:
            shown.append(session)
            if len(shown) == limit:
                break
    _show_sessions(shown, as_json)


@app.command("show", epilog="Example: rollout-service sessions show s-1")
@common.command
async def show(
    session_id: SessionId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False
) -> None:
    """Show a session and each of its turns: its value, and whether it is trained on."""
    async with common.connect(url, key) as client:
        session = await client.session(session_id)
    if as_json:
        common.print_json(session.model_dump(mode="json"))
        return
    _show_sessions([session], as_json=False)
    _show_turns(session)


@app.command(
    "judge", epilog='Example: rollout-service sessions judge s-1 --value -1 --text "answer in French"'
)
@common.command
async def judge(
    session_id: SessionId,
    value: Annotated[float, typer.Option(min=-1, max=1, help="How good the answer was.")],
    turn: Annotated[
        int | None,
        typer.Option(help="The turn; left out, the last one that was delivered.", show_default=False),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="What should have been different.", show_default=False)
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Give a turn a value, which wins over the judge's."""
    async with common.connect(url, key) as client:
        answer = await client.feedback(session_id, value, turn=turn, text=text)
    if as_json:
        common.print_json(answer.model_dump(mode="json"))
        return
    late = "; a run has the turn already, so this is kept as a revision" if answer.revised else ""
    common.out().print(f"turn {answer.turn}: {answer.value:g}{late}", soft_wrap=True)


@app.command("delete", epilog="Example: rollout-service sessions delete --user alice")
@common.command
async def delete(
    session_id: Annotated[str | None, typer.Argument(help="The session's id.", show_default=False)] = None,
    user: Annotated[
        str | None, typer.Option(help="Delete all sessions of this user instead.", show_default=False)
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="The user's tenant, if several have one of this name.", show_default=False),
    ] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Delete a session, or all of a user, and show which batches with parts of them a trainer has leased."""
    if (session_id is None) == (user is None) or (user is None and tenant is not None):
        raise common.CommandError("name what to delete", hint="Pass either a session's id or --user.")
    async with common.connect(url, key) as client:
        if user is not None:
            deleted = await client.delete_sessions(user=user, tenant=tenant)
        else:
            deleted = await client.delete_session(str(session_id))
    _show_deleted(deleted, as_json)


def _show_sessions(sessions: Sequence[LiveSession], as_json: bool) -> None:
    if as_json:
        common.print_json([session.model_dump(mode="json") for session in sessions])
        return
    if not sessions:
        common.out().print("There are no sessions. Open one with POST /v1/sessions.")
        return
    from rollout_service.cli.console import id_column, table

    names = ("state", "pool", "tenant", "train", "served", "judged", "delivered", "waiting", "dropped")
    rows = table(id_column("id"), *names)
    for session in sessions:
        counts = session.counts
        state = (
            session.state if session.closed_because is None else f"{session.state}: {session.closed_because}"
        )
        numbers = (counts.served, counts.judged, counts.delivered, counts.waiting)
        train = "yes" if session.train else "no"
        rows.add_row(
            session.session_id,
            state,
            session.pool,
            session.tenant,
            train,
            *map(str, numbers),
            _dropped(counts),
        )
    common.out().print(rows)


def _dropped(counts: SessionCounts) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.dropped.items())) or "0"


def _show_turns(session: LiveSession) -> None:
    from rollout_service.cli.console import Heading, table

    rows = table("turn", "kind", "value", "source", "votes - 0 + failed", "followed by", "trained on")
    for mark in session.turns:
        votes = mark.votes
        counted = "-" if votes is None else f"{votes.minus} {votes.zero} {votes.plus} {votes.failed}"
        state = mark.next_state
        rows.add_row(
            str(mark.turn),
            mark.kind,
            "-" if mark.value is None else f"{mark.value:g}",
            mark.source or "-",
            counted,
            "-" if state is None else f"{state.role}, {state.chars} characters",
            "yes" if mark.usable else f"no: {mark.masked_because}" if mark.masked_because else "not decided",
        )
    if session.turns:
        common.out().print(Heading("turns"))
        common.out().print(rows)


def _show_deleted(deleted: DeletedSessions, as_json: bool) -> None:
    if as_json:
        common.print_json(deleted.model_dump(mode="json"))
        return
    sessions = common.count(deleted.sessions, "session")
    turns, parts = common.count(deleted.turns, "turn"), common.count(deleted.undelivered, "part")
    common.out().print(f"deleted {sessions} with {turns}; {parts} had not been leased", soft_wrap=True)
    if not deleted.leased:
        return
    from rollout_service.cli.console import id_column, table

    rows = table(id_column("session"), "part", "run", "rollout", "batch")
    for part in deleted.leased:
        rows.add_row(
            part.session_id, str(part.part), part.run_id, part.rollout_id or "-", part.batch_id or "-"
        )
    common.err().print("A trainer may hold these parts; delete what it made of them:")
    common.out().print(rows)
