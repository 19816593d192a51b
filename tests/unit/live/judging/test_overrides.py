"""Rules decide before the judge, for what judges are known to miss."""

from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.base.errors import ConfigurationError
from rollout_service.live.contract import NextStateRecord, TurnRecord
from rollout_service.live.judging import overrides
from rollout_service.live.judging.overrides import Overrides, repeated_share
from tests.support.live.store import a_state, a_turn

ERROR = NextStateRecord(role="tool", text="Error: no", is_error=True, arrived_at=1.0)
PROSE = """The service starts a sandbox for each task, drives an agent against the engines of a trainer, scores the
outcome, and returns trajectories. A rollout that was accepted ends in exactly one state, through any crash. The store
is the queue: what was accepted is on disk before the answer, is leased to one pipeline, and its result is written
together with its state, only by whoever holds the lease. Token ids come from the engine and are never made from text
again. Queues are bounded, and so are sandboxes that are alive. A failure has no reward and a typed error."""


def session(*calls: str, followed: str = "") -> tuple[TurnRecord, list[TurnRecord]]:
    """Return the last turn and those before it; each letter is a call, and turns in `followed` have no next state."""
    turns = [
        a_turn(i, calls=tuple(made), next_state=None if str(i) in followed else a_state())
        for i, made in enumerate(calls)
    ]
    return turns[-1], turns[:-1]


def raises(turn: TurnRecord, earlier: Sequence[TurnRecord]) -> float:
    raise RuntimeError(turn.answer)


def gives_five(turn: TurnRecord, earlier: Sequence[TurnRecord]) -> float:
    return 5.0


def gives_half(turn: TurnRecord, earlier: Sequence[TurnRecord]) -> float:
    return 0.5


def plugin(value: str) -> EntryPoint:
    return EntryPoint(value, f"{__name__}:{value}", overrides.GROUP)


@pytest.mark.parametrize(
    ("name", "turn", "value"),
    [
        ("tool_error", a_turn(next_state=ERROR), -1.0),
        ("tool_error", a_turn(next_state=a_state()), None),
        ("tool_error", a_turn(), None),
        ("truncated", a_turn(truncated=True), -1.0),
        ("truncated", a_turn(), None),
        ("malformed", a_turn(malformed=1), -1.0),
        ("malformed", a_turn(), None),
        ("degenerate", a_turn(answer="a" * 8_000), -1.0),
        ("degenerate", a_turn(answer="I will try again. " * 50), -1.0),
        ("degenerate", a_turn(answer="ha ha ha"), None),
        ("degenerate", a_turn(answer=PROSE), None),
    ],
)
def test_a_rule_gives_its_value_or_none(name, turn, value):
    assert Overrides.load([name]).decide(turn, []) == (None if value is None else (name, value))


@pytest.mark.parametrize(
    ("calls", "repeats"),
    [
        (["a", "a"], True),
        (["a", "b", "a"], False),
        (["a", "b", "a", "b"], True),
        (["test", "edit", "test"], False),
        (["ab", "a"], True),
        (["a", "ab"], False),
        (["a", "", "a"], True),
        (["", ""], False),
        (["a"], False),
    ],
)
def test_a_call_is_repeated_if_nothing_new_was_called_since(calls, repeats):
    decided = Overrides.load(["repeated_call"]).decide(*session(*calls))
    assert decided == (("repeated_call", -1.0) if repeats else None)


def test_an_answer_that_was_asked_for_again_is_no_repeat():
    turn, earlier = session("a", "a", followed="0")
    assert Overrides.load(["repeated_call"]).decide(turn, earlier) is None


@given(st.text(max_size=2_000))
def test_a_share_is_a_share(text):
    assert 0.0 <= repeated_share(text) <= 1.0


def test_the_first_rule_that_decides_wins():
    turn = a_turn(truncated=True, malformed=1)
    assert Overrides.load(["tool_error", "malformed", "truncated"]).decide(turn, []) == ("malformed", -1.0)
    assert Overrides.load(["truncated", "malformed"]).decide(turn, []) == ("truncated", -1.0)
    assert not Overrides.load([])


def test_plug_ins_decide_and_those_that_fail_are_passed_over(capsys):
    names = ["raises", "gives_five", "gives_half"]
    rules = Overrides.load(names, plugins=[plugin(name) for name in names])
    assert rules.decide(a_turn(answer="my secret"), []) == ("gives_half", 0.5)
    assert "my secret" not in capsys.readouterr().out


def test_an_unknown_rule_is_refused_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"live\.judge\.overrides: .* did you mean tool_error"):
        Overrides.load(["tool_errors"])
