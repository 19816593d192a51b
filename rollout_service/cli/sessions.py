"""`rollout-service sessions`: list, show, judge and delete the live sessions of a running server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout_service.cli import common, completion

if TYPE_CHECKING:
    from api_schemas.sessions import DeletedSessions, FeedbackAnswer, LiveSession
    from rollout_client.client import RolloutClient

app = typer.Typer(
    name="sessions",
    help="List, show, judge and delete live sessions.",
    no_args_is_help=True,
)

SessionId = Annotated[
    str, typer.Argument(help="The session's id, from `sessions list`.", autocompletion=completion.sessions)
]


def _show_sessions(sessions: list[LiveSession]) -> None:
    if not sessions:
        common.out().print("There are no sessions. Open one with POST /v1/sessions.")
        return
    from rollout_service.cli.console import id_column, table

    names = ("state", "pool", "tenant", "train", "served", "judged", "delivered", "waiting", "dropped")
    rows = table(id_column("id"), *names)
    for session in sessions:
        counts = session.counts
        because = "" if session.closed_because is None else f": {session.closed_because}"
        numbers = (counts.served, counts.judged, counts.delivered, counts.waiting)
        about = (f"{session.state}{because}", session.pool, session.tenant, "yes" if session.train else "no")
        rows.add_row(session.session_id, *about, *map(str, numbers), common.joined_counts(counts.dropped) or "0")
    common.out().print(rows)


def _show_session(session: LiveSession) -> None:
    from rollout_service.cli.console import Heading, table

    _show_sessions([session])
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


def _show_answer(answer: FeedbackAnswer) -> None:
    late = "; a run has the turn already, so this is kept as a revision" if answer.revised else ""
    common.out().print(f"turn {answer.turn}: {answer.value:g}{late}", soft_wrap=True)


def _show_deleted(deleted: DeletedSessions) -> None:
    sessions = common.count(deleted.sessions, "session")
    turns, parts = common.count(deleted.turns, "turn"), common.count(deleted.undelivered, "part")
    common.out().print(f"deleted {sessions} with {turns}; {parts} had not been leased", soft_wrap=True)
    if not deleted.leased:
        return
    from rollout_service.cli.console import id_column, table

    rows = table(id_column("session"), "part", "run", "rollout", "batch")
    for part in deleted.leased:
        rows.add_row(part.session_id, str(part.part), part.run_id, part.rollout_id or "-", part.batch_id or "-")
    common.err().print("A trainer may hold these parts; delete what it made of them:")
    common.out().print(rows)


@app.command("list", epilog="Example: rollout-service sessions list --json")
@common.client_command(_show_sessions)
async def list_sessions(
    client: RolloutClient,
    limit: Annotated[int, typer.Option(min=1, help="The most sessions to show.")] = 100,
) -> list[LiveSession]:
    """Show sessions, the newest first, with the numbers of their turns."""
    return await common.first(client.sessions(), limit)


@app.command("show", epilog="Example: rollout-service sessions show s-1")
@common.client_command(_show_session)
async def show(client: RolloutClient, session_id: SessionId) -> LiveSession:
    """Show a session and each of its turns: its value, and whether it is trained on."""
    return await client.session(session_id)


@app.command("judge", epilog='Example: rollout-service sessions judge s-1 --value -1 --text "answer in French"')
@common.client_command(_show_answer)
async def judge(
    client: RolloutClient,
    session_id: SessionId,
    value: Annotated[float, typer.Option(min=-1, max=1, help="How good the answer was.")],
    turn: Annotated[
        int | None,
        typer.Option(help="The turn; left out, the last one that was delivered.", show_default=False),
    ] = None,
    text: Annotated[str | None, typer.Option(help="What should have been different.", show_default=False)] = None,
) -> FeedbackAnswer:
    """Give a turn a value, which wins over the judge's."""
    return await client.feedback(session_id, value, turn=turn, text=text)


@app.command("delete", epilog="Example: rollout-service sessions delete --user alice")
@common.client_command(_show_deleted)
async def delete(
    client: RolloutClient,
    session_id: Annotated[str | None, typer.Argument(help="The session's id.", show_default=False)] = None,
    user: Annotated[
        str | None, typer.Option(help="Delete all sessions of this user instead.", show_default=False)
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="The user's tenant, if several have one of this name.", show_default=False),
    ] = None,
) -> DeletedSessions:
    """Delete a session, or all of a user, and show which batches with parts of them a trainer has leased."""
    if session_id is not None and user is None and tenant is None:
        return await client.delete_session(session_id)
    if session_id is None and user is not None:
        return await client.delete_sessions(user=user, tenant=tenant)
    raise common.CommandError("name what to delete", hint="Pass either a session's id or --user.")
