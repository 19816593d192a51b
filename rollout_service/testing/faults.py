"""The ways in which a request to a scripted engine can go wrong."""

from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """One way in which a request can go wrong."""

    DROP = "drop"
    """The connection is closed without an answer."""
    HANG = "hang"
    """No answer comes."""
    GARBAGE = "garbage"
    """The answer is not JSON."""
    ERROR = "error"
    """The answer is a 500."""
    NO_LOGPROBS = "no_logprobs"
    SHORT_LOGPROBS = "short_logprobs"
    """One logprob is missing."""
    BAD_ID = "bad_id"
    """A sampled id is outside the vocabulary."""
    BAD_LOGPROB = "bad_logprob"
    """A logprob is null, as servers write NaN."""
    NO_EXTRAS = "no_extras"
    """The extras that were asked for are left out."""
    SHORT_EXTRAS = "short_extras"
    """One entry of each extra is missing."""
    QUEUE_ABORT = "queue_abort"
    """The answer is an abort without tokens, logprobs or counts, like SGLang's for a request in its queue."""
    DIE = "die"
    """The engine closes every connection and stops listening."""
    CUT = "cut"
    """The answer ends early, as if it were whole."""


@dataclass(frozen=True, slots=True)
class AfterTokens:
    """A fault that strikes a streamed answer once so many tokens were sent, and other answers as a whole."""

    tokens: int
    fault: Fault


BREAKING = frozenset(
    {Fault.DROP, Fault.HANG, Fault.GARBAGE, Fault.ERROR, Fault.QUEUE_ABORT, Fault.DIE, Fault.CUT}
)
"""Faults of the whole answer: nothing is sampled."""
