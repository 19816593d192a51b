"""What in a request for a run is allowed, and yet may not do what it is meant to do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from api_schemas.runs import Advantages, RunRequest
from rollout_service.groups.auxiliary import is_annealed, schedule_start


def run_warnings(request: RunRequest, total: int | None) -> list[str]:
    """Return sentences for the caller; `total` is the number of the run's tasks over all epochs, None if unbounded."""
    return [*_of_live(request), *_of_auxiliary(request, total)]


def _of_live(request: RunRequest) -> Iterator[str]:
    if request.live is not None and request.group_size > 1:
        yield (
            f"group_size: the run takes only sessions that were opened with a `group`, once {request.group_size} of a "
            "group have ended. With a group_size of 1 it takes every session."
        )


def _of_auxiliary(request: RunRequest, total: int | None) -> Iterator[str]:
    auxiliary = request.auxiliary
    if auxiliary is None:
        return
    if request.advantages is Advantages.GROUP_NORM:
        yield (
            "advantages: group_norm divides by the standard deviation of the total, which undoes the annealing: where "
            "outcomes are alike, advantages are as large as before until the weights are exactly 0. Use leave_one_out, "
            "or parts_norm, which normalizes each part alone."
        )
    if total is None or not is_annealed(auxiliary):
        return
    end = schedule_start(request, auxiliary) + auxiliary.length
    last = request.version + math.ceil(total / request.batch_size)
    if end > last:
        yield (
            f"auxiliary.length: the weights reach their end at version {end}, but the run's tasks are enough for "
            f"{last - request.version} batches at most, so with a version for each batch it ends at version {last}. "
            "Shorten the schedule, or raise the epochs."
        )
