"""The ids that the service makes for the parts of a run.

`parse` accepts exactly the texts that `str` makes, and raises ValueError for all others. Callers may choose such ids
for other rollouts, so a rollout belongs to a run because the store says so, not because its id looks like it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

_RUN = r"([A-Za-z0-9][A-Za-z0-9_-]{0,63})"
"""As in `api_schemas.runs.RunId`; it contains no dot."""
_NUMBER = r"(0|[1-9][0-9]{0,15})"
"""No store has a larger one."""
_GROUP = re.compile(rf"{_RUN}\.{_NUMBER}")
_SAMPLE = re.compile(rf"{_RUN}\.{_NUMBER}\.{_NUMBER}(?:\.([1-9][0-9]{{0,15}}))?")
_BATCH = re.compile(rf"{_RUN}\.b{_NUMBER}")


@dataclass(frozen=True, slots=True)
class GroupId:
    """A group of a run: `RUN.NUMBER`."""

    run: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        run, number = _match(_GROUP, text, "group")
        return cls(run, int(number))

    def __str__(self) -> str:
        return f"{self.run}.{self.number}"


@dataclass(frozen=True, slots=True)
class SampleId:
    """A rollout of a sample: `RUN.NUMBER.SAMPLE`, with `.RETRY` for the rollouts after the first."""

    run: str
    number: int
    sample: int
    retry: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        run, number, sample, retry = _match(_SAMPLE, text, "sample")
        return cls(run, int(number), int(sample), int(retry or 0))

    def __str__(self) -> str:
        suffix = f".{self.retry}" if self.retry else ""
        return f"{self.run}.{self.number}.{self.sample}{suffix}"


@dataclass(frozen=True, slots=True)
class BatchId:
    """A batch of a run: `RUN.bNUMBER`."""

    run: str
    number: int

    @classmethod
    def parse(cls, text: str) -> Self:
        run, number = _match(_BATCH, text, "batch")
        return cls(run, int(number))

    def __str__(self) -> str:
        return f"{self.run}.b{self.number}"


def _match(form: re.Pattern[str], text: str, kind: str) -> tuple[str, ...]:
    found = form.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not the id of a {kind}")
    return found.groups()
