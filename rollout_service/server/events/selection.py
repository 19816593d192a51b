"""Which events a reader wants: of some kinds, about some subjects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from api_schemas.errors import FieldError
from api_schemas.events import EventKind
from rollout_service.base.errors import InvalidFieldError, did_you_mean

PREFIXES = frozenset(f"{kind.partition('.')[0]}." for kind in EventKind)
"""What may stand for all kinds that begin with it."""


@dataclass(frozen=True, slots=True)
class EventSelection:
    """Chooses events by kind and subject."""

    kinds: frozenset[str]
    """The kinds and prefixes; all kinds if it is empty."""
    subjects: frozenset[str]
    """The subjects; all if it is empty."""

    @classmethod
    def of(cls, kinds: Sequence[str], subjects: Sequence[str]) -> EventSelection:
        """Return the selection of these kinds, such as `run.state` or `run.` for all of runs, and subjects.

        Raises:
            InvalidFieldError: There is no such kind.
        """
        known = {*map(str, EventKind), *PREFIXES}
        unknown = [kind for kind in kinds if kind not in known]
        if unknown:
            raise InvalidFieldError(
                [
                    FieldError(path="query.kind", message=f"no kind of event{did_you_mean(kind, known)}")
                    for kind in unknown
                ],
                hint="Name a kind, such as `rollout.state`, or a prefix with its dot, such as `rollout.`.",
            )
        return cls(frozenset(kinds), frozenset(subjects))

    @property
    def is_partial(self) -> bool:
        """Whether the reader wants only some events."""
        return bool(self.kinds or self.subjects)

    def has(self, kind: str, subject: str) -> bool:
        """Return whether a reader wants an event."""
        if self.subjects and subject not in self.subjects:
            return False
        return not self.kinds or kind in self.kinds or f"{kind.partition('.')[0]}." in self.kinds
