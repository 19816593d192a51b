"""The bodies of the embedded engine's requests, the part of SGLang's that it supports, and the extras of its answers.

Unknown fields are refused.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from api_schemas.inference import PauseMode
from rollout_service.engines.kinds.embedded.sampler import SamplerSettings, log_softmax
from rollout_service.engines.kinds.embedded.weights import Array


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SamplingParams(_Body):
    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    # With penalties, the reported logprobs would not be those of the distribution that is sampled from.
    frequency_penalty: float = Field(0.0, ge=0.0, le=0.0)
    presence_penalty: float = Field(0.0, ge=0.0, le=0.0)
    repetition_penalty: float = Field(1.0, ge=1.0, le=1.0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: Literal[True] = True
    sampling_seed: int | None = None
    json_schema: str | None = None
    """Known only to be refused by name."""
    stream_interval: int = Field(1, ge=1)


class GenerateBody(_Body):
    input_ids: list[int] = Field(min_length=1)
    rid: str | None = Field(None, min_length=1)
    sampling_params: SamplingParams = SamplingParams()
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, ge=-1)
    top_logprobs_num: int = Field(0, ge=0)
    extra_key: str | None = Field(None, max_length=256)
    stream: bool = False


class AbortBody(_Body):
    rid: str = ""
    abort_all: bool = False


class PauseBody(_Body):
    mode: Literal[PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE] = PauseMode.ABORT


class UpdateBody(_Body):
    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class VersionBody(_Body):
    new_version: str
    abort_all_requests: bool = True


_ROWS = 64
"""Positions read at once, since probabilities take memory by the size of the vocabulary."""
_AT_ONE = SamplerSettings()

Entry = tuple[float, int]


@dataclass(slots=True)
class PromptReading:
    """The log-probabilities of a prompt, filled in chunk by chunk.

    They are at temperature 1, all of the same weights, one for each token after `start`, and whole before the first
    token is sampled.
    """

    prompt: list[int]
    start: int
    """The token before the first that has one, as SGLang counts."""
    logprobs: list[float] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.logprobs) == len(self.prompt) - 1 - self.start

    def restart(self) -> None:
        self.logprobs.clear()

    def read(self, logits: Array, first: int) -> None:
        """Add the logits of successive positions from `first` on, `[positions, vocab_size]`."""
        begin = self.start + len(self.logprobs)
        tokens = self.prompt[begin + 1 : first + len(logits) + 1]
        for offset in range(0, len(tokens), _ROWS):
            some = np.array(tokens[offset : offset + _ROWS])
            rows = logits[begin - first + offset :][: len(some)]
            values = log_softmax(rows, [_AT_ONE] * len(some))
            self.logprobs += values[np.arange(len(some)), some].tolist()

    def entries(self) -> list[list[object]]:
        """Return SGLang's `input_token_logprobs`, whose first has no log-probability."""
        first, *tokens = self.prompt[self.start :]
        entries: list[list[object]] = [[None, first, None]]
        entries += ([value, token, None] for value, token in zip(self.logprobs, tokens, strict=True))
        return entries


def likeliest(logits: Array, settings: SamplerSettings, count: int) -> list[Entry]:
    """Return the likeliest tokens of one row of logits, best first, under the distribution of the samples' logprobs."""
    values: NDArray[np.float64] = log_softmax(logits[None], [settings])[0]
    order = np.argsort(-values, kind="stable")[:count]
    return [(float(values[token]), int(token)) for token in order]
