"""A teacher's log-probabilities of a recorded answer: how likely its own tokens are to a model that knows the hint.

There is exactly one finite entry per sampled token, from one version of one model, or none and a reason. The teacher
reads the policy's own ids, so a pool with another vocabulary is never asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final

import anyio

from api_schemas.rollouts.sessions import Teacher
from rollout_service.engines.contract import (
    GenerateRequest,
    Generation,
    RequestedExtras,
    SamplingOptions,
    new_request_id,
)
from rollout_service.engines.errors import InferenceError
from rollout_service.engines.pool.pool import BackendPool
from rollout_service.engines.serving.policies import PolicyServing, PoolModel

READ_SECONDS: Final = 60.0
"""For one answer."""
_COMPARED_IDS: Final = 4_096


@dataclass(frozen=True, slots=True)
class TeacherReading:
    teacher: Teacher | None
    reason: str = ""
    """`no_backend`, `other_vocabulary`, `context_full`, `timeout`, `incomplete`, or the code of the engine's error."""


@dataclass(eq=False)
class TeacherReader:
    serving: PolicyServing
    pool: str | None = None
    """By default, the session's own."""
    _: KW_ONLY
    read_seconds: float = READ_SECONDS

    async def read(self, policy_pool: str, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> TeacherReading:
        """Never raise: failures are reasons."""
        try:
            with anyio.fail_after(self.read_seconds):
                return await self._read(policy_pool, prompt_ids, sampled_ids)
        except TimeoutError:
            return TeacherReading(None, "timeout")
        except InferenceError as error:
            return TeacherReading(None, error.code)

    async def _read(self, policy_pool: str, prompt_ids: Sequence[int], sampled_ids: Sequence[int]) -> TeacherReading:
        pool = self.pool or policy_pool
        served, engines = self.serving.connect(pool)
        if pool != policy_pool and not share_vocabulary(self.serving.connect(policy_pool)[0], served, sampled_ids):
            return TeacherReading(None, "other_vocabulary")
        if len(prompt_ids) + len(sampled_ids) >= served.context_length - 1:
            return TeacherReading(None, "context_full")
        request = GenerateRequest(
            new_request_id(),
            [*prompt_ids, *sampled_ids],
            SamplingOptions(max_new_tokens=1),
            RequestedExtras(prompt_logprobs_from=len(prompt_ids)),
        )
        generation = await engines.generate(request)
        logprobs = _complete(generation, len(sampled_ids))
        if logprobs is None:
            return TeacherReading(None, "incomplete")
        return TeacherReading(Teacher(model=_model(engines, generation), logprobs=logprobs))


def _complete(generation: Generation, count: int) -> list[float] | None:
    """Return None unless each of `count` tokens has a finite log-probability."""
    read = generation.extras.prompt_logprobs
    if not count or read is None or len(read) != count or not generation.versions:
        return None
    known = [value for value in read if value is not None and math.isfinite(value)]
    return known if len(known) == count else None


def _model(engines: BackendPool, generation: Generation) -> str:
    """Name the model, which had the version of the first sampled token."""
    paths = {view.backend_id: view.model_path for view in engines.views()}
    path = paths.get(generation.backend_id) or next(iter(paths.values()), "unknown")
    return f"{path}@{generation.versions[0]}"


def share_vocabulary(policy: PoolModel, teacher: PoolModel, ids: Sequence[int]) -> bool:
    """Compare the vocabularies, as far as these ids can tell."""
    one, other = policy.renderer, teacher.renderer
    some = list(ids[:_COMPARED_IDS])
    return one is other or (one.vocab_size == other.vocab_size and one.decode(some) == other.decode(some))
