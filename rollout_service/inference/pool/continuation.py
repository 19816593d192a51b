"""One turn from one or more engine calls: an interruptible generation.

An engine may end a request early, because of an abort for a weight update or because its machine died.
`Continuation` keeps the sampled tokens and asks for the rest. It never samples a token twice or exceeds the budget:
however often a request for N tokens is interrupted, the result is that of one request for N tokens.
"""

from dataclasses import dataclass, field, replace

from api_schemas.trajectories import FinishReason
from rollout_service.inference.contract import GenerateRequest, Generation
from rollout_service.inference.pool.merge_extras import MergedExtras

_MAX_ATTEMPTS = 10_000  # as many as the attempt suffix of a request id can number


@dataclass(slots=True)
class Continuation:
    """The tokens sampled for `request` so far."""

    request: GenerateRequest
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    attempts: int = 0
    engine_seconds: float = 0.0
    _cached_tokens: int | None = None
    _exposed: set[int] = field(default_factory=set)
    _extras: MergedExtras = field(init=False)

    def __post_init__(self) -> None:
        self._extras = MergedExtras(self.request.extras)

    def next_request(self) -> GenerateRequest:
        """Return the request for the remaining tokens, under a new id."""
        request_id = f"{self.request.request_id}-{self.attempts % _MAX_ATTEMPTS:04d}"
        self.attempts += 1
        sampling = self.request.sampling
        prompt = self.request.input_ids
        if self.output_ids:
            sampling = replace(sampling, max_new_tokens=sampling.max_new_tokens - len(self.output_ids))
            prompt = [*prompt, *self.output_ids]
        return GenerateRequest(request_id, prompt, sampling, self._extras.next(), self.request.known)

    def add(self, part: Generation, read_by: int | None = None) -> Generation | None:
        """Add an engine's answer, and return the whole generation once it is complete.

        `read_by` is the only weight version whose KV the request could find when it was sent; None if it could find
        that of any version.
        """
        exposed = set(part.versions) - {read_by}
        if self.attempts <= 1 and not exposed and part.finish_reason is not FinishReason.ABORT:
            return part  # the usual case: nothing to join
        self._exposed |= exposed
        self.output_ids.extend(part.output_ids)
        self.logprobs.extend(part.logprobs)
        self.versions.extend(part.versions)
        self._extras.add(part.extras)
        self.engine_seconds += part.engine_seconds
        if self._cached_tokens is None and part.output_ids:
            self._cached_tokens = part.cached_tokens
        finish_reason = part.finish_reason
        if finish_reason is FinishReason.ABORT:
            if len(self.output_ids) < self.request.sampling.max_new_tokens:
                return None
            finish_reason = FinishReason.LENGTH
        return Generation(
            output_ids=self.output_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=finish_reason,
            matched=part.matched,
            prompt_tokens=len(self.request.input_ids),
            cached_tokens=self._cached_tokens or 0,
            backend_id=part.backend_id,
            engine_seconds=self.engine_seconds,
            kept_kv_versions=frozenset(self._exposed),
            extras=self._extras.whole(),
        )
