"""Rollouts as rows of lists, and the cursors of lists.

A cursor says where a page ended and in which order, so one of another order is refused instead of giving a wrong page.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from api_schemas.errors import FieldError
from api_schemas.rollouts import BranchPoint, Rollout, RolloutState, StopReason
from api_schemas.views.summaries import RolloutSummary, SummaryOrder
from rollout_service.base.errors import InvalidFieldError
from rollout_service.store.codec.record import Row
from rollout_service.store.codec.rollouts import reading, when

NO_FIGURES: Mapping[str, int | float | None] = {"turns": None, "tokens": None, "worked": None}
"""The figures of a record that cannot be read."""
_CURSOR = re.compile(r"([no])([0-9]{1,18})")


def figures(result: Rollout) -> dict[str, int | float | None]:
    usage, worked = result.usage, sum(span.seconds for span in result.spans)
    return {"turns": usage.turns, "tokens": usage.sampled_tokens, "worked": worked}


def decode_summary(row: Row) -> RolloutSummary:
    branch_of = row["branch_of"]
    with reading(row["rollout_id"]):
        return RolloutSummary(
            rollout_id=row["rollout_id"],
            state=RolloutState(row["state"]),
            environment=row["environment"],
            pool=row["pool"],
            run_id=row["run_id"],
            group=row["group_number"],
            branch_of=None if branch_of is None else BranchPoint.model_validate_json(branch_of),
            attempt=row["attempt"],
            reward=row["reward"],
            stop_reason=None if row["stop_reason"] is None else StopReason(row["stop_reason"]),
            error_code=row["code"],
            created_at=when(row["created_at"]),
            changed_at=when(row["changed_at"]),
            turns=row["turns"],
            tokens=row["tokens"],
            seconds=row["worked"],
        )


def count_states(counts: Mapping[RolloutState, int], states: Collection[RolloutState]) -> int:
    """Count the rollouts in these states, or in all if there are none."""
    return sum(count for state, count in counts.items() if not states or state in states)


def encode_cursor(order: SummaryOrder, position: int | None) -> str | None:
    return None if position is None else f"{order[0]}{position}"


def decode_cursor(order: SummaryOrder, cursor: str | None) -> int | None:
    """
    Raises:
        InvalidFieldError: It is not a cursor of this order.
    """
    if cursor is None:
        return None
    found = _CURSOR.fullmatch(cursor)
    if found is None or found[1] != order[0]:
        why = "of another order" if found else "not a cursor"
        problem = FieldError(path="query.cursor", message=f"{cursor!r} is {why}")
        raise InvalidFieldError(
            [problem],
            hint="Pass `next_cursor` of the previous page with the same `order`, or omit the cursor.",
        )
    return int(found[2])
