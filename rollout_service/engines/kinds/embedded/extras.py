"""What a request to the embedded engine may ask for beyond its samples: log-probabilities of its prompt, likely tokens.

Guarantees: a prompt's log-probabilities are at temperature 1, all of the same weights, and one for each token after
`start`, before the first token is sampled. Likely tokens are of the distribution of the samples' log-probabilities.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout_service.engines.kinds.embedded.sampler import SamplerSettings, log_softmax
from rollout_service.engines.kinds.embedded.weights import Array

_ROWS = 64
"""Positions that are read at once, since their probabilities take memory by the size of the vocabulary."""
_AT_ONE = SamplerSettings()

Entry = tuple[float, int]
"""A log-probability and a token."""


@dataclass(slots=True)
class PromptReading:
    """The log-probabilities of a prompt, which are filled in chunk by chunk."""

    prompt: list[int]
    start: int
    """The token before the first that has one, as SGLang counts."""
    logprobs: list[float] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether the whole prompt has been read."""
        return len(self.logprobs) == len(self.prompt) - 1 - self.start

    def restart(self) -> None:
        """Forget what was read of a prompt that was interrupted."""
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
    """Return the likeliest tokens of one row of logits, best first."""
    values: NDArray[np.float64] = log_softmax(logits[None], [settings])[0]
    order = np.argsort(-values, kind="stable")[:count]
    return [(float(values[token]), int(token)) for token in order]
