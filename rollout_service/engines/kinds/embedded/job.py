"""One request inside the embedded engine: its prompt, its output, and why it ended."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rollout_service.engines.kinds.embedded.bodies import Entry, PromptReading
from rollout_service.engines.kinds.embedded.sampler import SamplerSettings

_ID_BITS = 32


@dataclass(slots=True, eq=False, kw_only=True)
class EngineJob:
    """Only the engine's thread writes it; others may read it once `notify` was called."""

    rid: str
    prompt: list[int]
    sampler: SamplerSettings
    max_new_tokens: int
    stop_ids: frozenset[int]
    stop_texts: tuple[str, ...] = ()
    notify: Callable[[], object]
    """Called on the engine's thread when the job has ended, and after each token if `streams`."""
    streams: bool = False
    reading: PromptReading | None = None
    likely: int = 0
    namespace: int = 0
    """Jobs of different namespaces share no KV."""
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    likeliest: list[list[Entry]] = field(default_factory=list)
    finish: dict[str, Any] | None = None
    """SGLang's finish_reason, once the job has ended."""
    cached_tokens: int = 0
    stored_tokens: int = 0
    """How many leading positions were given to the prefix cache."""
    retractions: int = 0
    _version_starts: list[tuple[str, int]] = field(default_factory=list)
    _created: float = field(default_factory=time.monotonic)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def cache_ids(self) -> list[int]:
        """Prompt and output as keys of the prefix cache, where the first id depends on the namespace."""
        first, *rest = self.tokens
        return [first + (self.namespace << _ID_BITS), *rest]

    @property
    def cacheable(self) -> int:
        """How many tokens' KV may come from the cache: the logits of the others are needed."""
        if self.reading is None or self.reading.is_whole:
            return self.length - 1
        return min(self.length - 1, self.reading.start)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def largest_length(self) -> int:
        return len(self.prompt) + self.max_new_tokens

    def append(self, token: int, logprob: float, version: str, likeliest: list[Entry] | None = None) -> None:
        if likeliest is not None:
            self.likeliest.append(likeliest)
        if not self._version_starts or self._version_starts[-1][0] != version:
            self._version_starts.append((version, len(self.output)))
        self.output.append(token)
        self.logprobs.append(logprob)

    def end(self, finish: dict[str, Any]) -> None:
        self.finish = finish
        self.notify()

    def meta_info(self, engine_version: str, since: int = 0) -> dict[str, Any]:
        """Return SGLang's `meta_info` for the tokens so far, with the logprobs of those after the first `since`."""
        finish = self.finish  # read first: once it is set, no token follows
        count = len(self.logprobs)  # the last part of a token to be written
        starts = [(version, start) for version, start in self._version_starts if start < count]
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": finish,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": count,
            "cached_tokens": self.cached_tokens,
            "reasoning_tokens": 0,
            "num_retractions": self.retractions,
            "weight_version": starts[-1][0] if starts else engine_version,
            "output_token_logprobs": [
                [logprob, token, None]
                for logprob, token in zip(self.logprobs[since:count], self.output[since:count], strict=True)
            ],
            "output_token_logprobs_length": count,
            "e2e_latency": time.monotonic() - self._created,
        }
        if self.reading is not None and count:
            meta["input_token_logprobs"] = self.reading.entries()
        if self.likely:
            rows = self.likeliest[since:count]
            meta["output_top_logprobs"] = [[[value, token, None] for value, token in row] for row in rows]
        if len(starts) > 1:
            ends = [start for _, start in starts[1:]] + [count]
            meta["weight_versions"] = [
                {"version": version, "start": start, "end": end}
                for (version, start), end in zip(starts, ends, strict=True)
            ]
        return meta
