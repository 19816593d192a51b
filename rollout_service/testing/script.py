"""The answers of a scripted engine, which depend only on prompt and budget: retries and restarts change nothing."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

_ID_TYPE = "i"


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole turn, which ends by itself if `stops`, and otherwise with the budget."""

    ids: Sequence[int]
    stops: bool = True
    seconds: float | None = None
    """How long it takes, without simulated hardware; None for as long as the engine's other turns."""

    def part(self, start: int, end: int | None = None) -> "Reply":
        """Return the tokens from `start` to `end`; the part stops if it has the last token of a turn that does.

        The rest of an interrupted turn takes as long as other turns.
        """
        ids = self.ids[start:end]
        return Reply(ids, self.stops and start + len(ids) == len(self.ids), None if start else self.seconds)


class Script(Protocol):
    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        """Return the turn that follows this prompt; the engine cuts it at `budget` tokens."""


class Replies:
    """Fixed turns, in order: the answer is the first one that the prompt does not contain yet, after those before it.

    The last one repeats forever.
    """

    def __init__(self, turns: Sequence[Sequence[int]]) -> None:
        if not turns or not all(turns):
            raise ValueError("a script has at least one turn, and every turn at least one token")
        self._replies = [Reply(list(turn)) for turn in turns]
        self._patterns = [array(_ID_TYPE, turn).tobytes() for turn in turns]

    @classmethod
    def from_texts(cls, texts: Sequence[str], tokenizer_folder: Path) -> "Replies":
        """Return a script of texts, in which special tokens such as the end of the turn are spelled out."""
        tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
        return cls([tokenizer.encode(text, add_special_tokens=False).ids for text in texts])

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        del budget
        if len(self._replies) == 1:
            return self._replies[0]
        prompt = array(_ID_TYPE, input_ids).tobytes()
        position = 0
        for reply, pattern in zip(self._replies, self._patterns, strict=True):
            position = _find(prompt, pattern, position)
            if position < 0:
                return reply
            position += len(pattern)
        return self._replies[-1]


@dataclass(frozen=True, slots=True)
class Counting:
    """Tokens that depend only on their position, so tests know the right continuation of any prompt."""

    vocab_size: int = 512

    def token_at(self, position: int) -> int:
        return (position * 7 + 3) % self.vocab_size

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        start = len(input_ids)
        return Reply([self.token_at(position) for position in range(start, start + budget)], stops=False)


def _find(haystack: bytes, needle: bytes, start: int) -> int:
    """Find `needle` like `bytes.find`, but only at the start of an array item."""
    width = array(_ID_TYPE).itemsize
    position = haystack.find(needle, start)
    while position % width and position >= 0:
        position = haystack.find(needle, position + 1)
    return position
