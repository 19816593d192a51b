"""Which hint makes a teacher expect what the policy nearly said: the overlap of their likeliest tokens.

Guarantee: the overlap of a hint is the sum, over positions of the recorded answer, of how many of the k likeliest
tokens the policy without and the teacher with the hint have in common, each after the same recorded tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import anyio

from rollout_service.engines.contract import (
    GenerateRequest,
    RequestedExtras,
    SamplingOptions,
    new_request_id,
)
from rollout_service.engines.errors import BackendProtocolError
from rollout_service.live.judging.teacher import PoolEngines
from sandboxes.task_groups import open_task_group

TOP: Final = 4
POSITIONS: Final = 64
"""The positions of a longer answer that are looked at, evenly spread: each costs a request for one token."""
AT_ONCE: Final = 8


async def overlaps(
    policy: PoolEngines,
    teacher: PoolEngines,
    prompt_ids: Sequence[int],
    hinted: Sequence[Sequence[int]],
    sampled_ids: Sequence[int],
) -> list[int]:
    """Return the overlap under each hinted prompt.

    Raises:
        InferenceError: An engine does not return its likeliest tokens, or does not answer.
    """
    places = positions(len(sampled_ids))
    limit = anyio.CapacityLimiter(AT_ONCE)
    found: dict[tuple[int, int], frozenset[int]] = {}

    async def look(number: int, place: int, engines: PoolEngines, prompt: Sequence[int]) -> None:
        async with limit:
            found[number, place] = await likeliest(engines, [*prompt, *sampled_ids[:place]])

    async with open_task_group() as tasks:
        for place in places:
            tasks.start_soon(look, -1, place, policy, prompt_ids)
            for number, prompt in enumerate(hinted):
                tasks.start_soon(look, number, place, teacher, prompt)
    return [
        sum(len(found[-1, place] & found[number, place]) for place in places) for number in range(len(hinted))
    ]


def positions(length: int) -> list[int]:
    """Return the positions of an answer of this length that are looked at."""
    count = min(length, POSITIONS)
    return [number * length // count for number in range(count)]


async def likeliest(engines: PoolEngines, ids: Sequence[int]) -> frozenset[int]:
    """Return the likeliest tokens after these ids.

    Raises:
        InferenceError: The engine does not return them.
    """
    request = GenerateRequest(
        new_request_id(), list(ids), SamplingOptions(max_new_tokens=1), RequestedExtras(top_logprobs=TOP)
    )
    top = (await engines.generate(request)).extras.top_logprobs
    if not top:
        raise BackendProtocolError("the engine sampled nothing, so it has no likeliest tokens")
    return frozenset(each.token_id for each in top[0])
