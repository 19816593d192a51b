"""Rules that decide a turn's value before the judge is asked, for cases that judges are known to miss.

Rules are pure functions of the turn and of those before it; the first that decides wins, in the order of the settings.
Their time is linear in the length of an answer. A plug-in that fails, or returns no number from -1 to 1, is passed over
and logged.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Final

import structlog

from rollout_service.judging.rubric import cut_middle
from rollout_service.live.contract import TurnRecord
from rollout_service.live.detectors import load_functions

log = structlog.get_logger(__name__)

GROUP: Final = "rollout_service.overrides"
"""The entry point group; each entry point is an `Override`."""

Override = Callable[[TurnRecord, Sequence[TurnRecord]], float | None]
"""Returns a turn's value, given the earlier turns in their order; None leaves it to others."""

LOOKBACK: Final = 64
"""Turn ids before a turn that are looked at."""
_PIECE: Final = re.compile(r"\w{1,8}|[^\w\s]")
_GRAM, _LEAST_GRAMS, _REPEATED_SHARE = 4, 64, 0.7
_READ_CHARS: Final = 32_768


def tool_error(turn: TurnRecord, _earlier: Sequence[TurnRecord]) -> float | None:
    """Give -1 if a tool's result says that it failed."""
    return -1.0 if turn.next_state is not None and turn.next_state.is_error else None


def truncated(turn: TurnRecord, _earlier: Sequence[TurnRecord]) -> float | None:
    return -1.0 if turn.truncated else None


def malformed(turn: TurnRecord, _earlier: Sequence[TurnRecord]) -> float | None:
    return -1.0 if turn.malformed else None


def repeated_call(turn: TurnRecord, earlier: Sequence[TurnRecord]) -> float | None:
    """Give -1 if all calls were made before, and nothing new in between.

    So tests that run again after an edit are no repeat, while a loop of the same calls is. Turns that nothing followed,
    such as an answer that was asked for again, are not looked at.
    """
    calls = set(turn.calls)
    if not calls:
        return None
    since: set[str] = set()
    for turn_before in reversed(earlier):
        if turn_before.next_state is None or not turn_before.calls:
            continue
        if calls <= set(turn_before.calls):
            return -1.0 if since <= _called(earlier, turn_before.turn) else None
        since.update(turn_before.calls)
    return None


def degenerate(turn: TurnRecord, _earlier: Sequence[TurnRecord]) -> float | None:
    """Give -1 if most of the answer repeats itself."""
    return -1.0 if repeated_share(turn.answer) > _REPEATED_SHARE else None


def repeated_share(text: str) -> float:
    """Return the share of 4-grams that occurred before; 0 for a text that is too short to tell."""
    pieces = _PIECE.findall(cut_middle(text, _READ_CHARS))
    grams = list(zip(*(pieces[start:] for start in range(_GRAM)), strict=False))
    return 1 - len(set(grams)) / len(grams) if len(grams) >= _LEAST_GRAMS else 0.0


BUILT_IN: Final[Mapping[str, Override]] = {
    "tool_error": tool_error,
    "truncated": truncated,
    "malformed": malformed,
    "repeated_call": repeated_call,
    "degenerate": degenerate,
}


class Overrides:
    def __init__(self, rules: Mapping[str, Override]) -> None:
        self._rules = rules

    def __bool__(self) -> bool:
        return bool(self._rules)

    @classmethod
    def load(cls, names: Iterable[str], *, plugins: Iterable[EntryPoint] | None = None) -> Overrides:
        """Load rules by their names; this imports plug-ins, so call it in a thread."""
        setting = "live.judge.overrides"
        return cls(load_functions(names, BUILT_IN, group=GROUP, setting=setting, plugins=plugins))

    def decide(self, turn: TurnRecord, earlier: Sequence[TurnRecord]) -> tuple[str, float] | None:
        """Return the name and value of the first rule that decides; None if none does."""
        for name, rule in self._rules.items():
            value = _apply(name, rule, turn, earlier)
            if value is not None:
                return name, value
        return None


def _called(turns: Sequence[TurnRecord], up_to: int) -> set[str]:
    return {call for turn in turns if turn.turn <= up_to for call in turn.calls}


def _apply(name: str, rule: Override, turn: TurnRecord, earlier: Sequence[TurnRecord]) -> float | None:
    try:
        value = rule(turn, earlier)
        if value is None or (math.isfinite(value) and -1 <= value <= 1):
            return value
        problem = "it returned no number from -1 to 1"
    except Exception as error:  # noqa: BLE001 - whatever a plug-in raises; its message may quote the turn
        problem = type(error).__name__
    log.error(
        "an override failed and was passed over",
        override=name,
        session_id=turn.session_id,
        turn=turn.turn,
        error=problem,
        hint="Correct the plug-in, or remove its name from live.judge.overrides.",
    )
    return None
