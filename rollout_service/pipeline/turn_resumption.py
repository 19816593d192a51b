"""Continues an interrupted rollout from the turns that it had saved, and reports how that went.

Guarantee: an attempt either plays every saved turn exactly as it was, or raises CannotResumeError before anything is
sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import anyio.to_thread
import structlog
from pydantic import JsonValue

from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import waits_for
from rollout_service.base.errors import StoreError
from rollout_service.engines.serving.saved_turns import SavedTurn, UnreadableTurnError, decode
from rollout_service.engines.serving.turn_log import AnewReason, CannotResumeError, TurnLog
from rollout_service.environments.contract import Environment
from rollout_service.pipeline.context import AttemptContext
from rollout_service.pipeline.turn_writer import NOT_REPLAYABLE
from rollout_service.store.contract import Lease
from rollout_service.store.retrying import retry_until_stored

log = structlog.get_logger(__name__)

RESUMED, BEGUN_ANEW = "resumed", "begun_anew"
EVENT = "rollout.resume"
"""The kind of the events; their data is `outcome`, `reason`, `turns` and `seconds`."""


async def open_turn_log(context: AttemptContext, lease: Lease, environment: Environment) -> TurnLog:
    """Return the turns of an attempt: the saved ones to play first, and where to save the others.

    Raises:
        CannotResumeError: There are saved turns, and they cannot be played.
    """
    writer = context.turn_writer
    # Sub-agents would be sampled anew, and the agent be told something else than before.
    is_replayable = environment.replayable != "never" and environment.spec.parallel is None
    saved: Sequence[SavedTurn] = ()
    if lease.saved_turns:
        if writer is None:
            raise CannotResumeError(AnewReason.DISABLED)
        if not is_replayable:
            raise CannotResumeError(AnewReason.NOT_REPLAYABLE)
        saved = await _read(context, lease.rollout_id)

    def save(number: int, turn: SavedTurn) -> None:
        if writer is not None and (is_replayable or number == 0):
            writer.add(lease, number, turn if is_replayable else None)

    async def on_resumed() -> None:
        await report(context, lease, turns, outcome=RESUMED)

    turns = TurnLog(saved, save=save, on_resumed=on_resumed)
    return turns


async def report(
    context: AttemptContext, lease: Lease, turns: TurnLog | None, *, outcome: str, reason: str = ""
) -> None:
    """Count an attempt that followed an interruption, and record it as an event."""
    played = turns.played if turns else 0
    seconds = turns.replay_seconds if turns else 0.0
    context.metrics.count_resume(outcome, reason, played if outcome == RESUMED else 0)
    log.info("interrupted rollout taken up", outcome=outcome, reason=reason, turns=played, seconds=seconds)
    data: dict[str, JsonValue] = {
        "outcome": outcome,
        "reason": reason,
        "turns": played,
        "seconds": round(seconds, 3),
    }
    try:
        with waits_for(StepKind.STORE, "record the resumption"):
            await context.store.record(EVENT, lease.rollout_id, data)
    except StoreError as error:
        log.warning("an event could not be recorded", kind=EVENT, error=str(error), hint=error.hint)


async def _read(context: AttemptContext, rollout_id: str) -> list[SavedTurn]:
    what = "read the saved turns"
    with waits_for(StepKind.STORE, what):
        data = await retry_until_stored(what, partial(context.store.saved_turns, rollout_id))
    if NOT_REPLAYABLE in data:
        raise CannotResumeError(AnewReason.NOT_REPLAYABLE)
    try:
        return await anyio.to_thread.run_sync(lambda: [decode(each) for each in data])
    except UnreadableTurnError as error:
        log.warning("saved turns cannot be read", rollout_id=rollout_id, error=str(error))
        raise CannotResumeError(AnewReason.UNREADABLE) from error
