"""A turn's value rests on the judge's valid votes; without any there is none, which is not 0."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts.sessions import MarkReason
from rollout_service.base.errors import ServiceError
from rollout_service.engines.errors import BackendUnreachable, NoBackendError, PromptTooLong
from rollout_service.judging.contract import Vote, VoteOutcome
from rollout_service.live.judging.prompt import VALUES
from rollout_service.live.judging.turn_judge import outage, tally

LATE = Vote(VoteOutcome.TIMED_OUT)
UNREADABLE = Vote(VoteOutcome.UNREADABLE)


def votes(*labels: str) -> list[Vote]:
    return [Vote(VoteOutcome.VALID, label) for label in labels]


def failed(error: ServiceError) -> Vote:
    return Vote(VoteOutcome.FAILED, error=error)


@pytest.mark.parametrize(
    ("given", "value", "reason"),
    [
        (votes("1", "1", "-1"), 1.0, MarkReason.MAJORITY),
        (votes("0", "0", "1"), 0.0, MarkReason.MAJORITY),
        (votes("-1"), -1.0, MarkReason.MAJORITY),
        ([*votes("1"), LATE, UNREADABLE], 1.0, MarkReason.MAJORITY),
        (votes("1", "1", "0", "-1"), 1.0, MarkReason.MAJORITY),
        (votes("1", "-1"), 0.0, MarkReason.TIE),
        (votes("1", "0", "-1"), 0.0, MarkReason.TIE),
        ([*votes("1", "-1"), LATE], 0.0, MarkReason.TIE),
        ([LATE, LATE, LATE], None, MarkReason.TIMEOUT),
        ([LATE, LATE, UNREADABLE], None, MarkReason.ALL_FAILED),
        (votes("2", "7", "plus"), None, MarkReason.ALL_FAILED),
        ([], None, MarkReason.ALL_FAILED),
    ],
)
def test_the_most_valid_votes_decide(given, value, reason):
    outcome = tally(given)
    assert (outcome.value, outcome.reason) == (value, reason)


@given(st.lists(st.sampled_from([*votes(*VALUES), LATE, UNREADABLE, *votes("9")])), st.randoms())
def test_every_vote_is_counted_once_and_their_order_is_nothing(given, random):
    outcome = tally(given)
    counted = outcome.votes
    assert counted.minus + counted.zero + counted.plus + counted.failed == len(given)
    assert (outcome.value is None) == (counted.failed == len(given))
    counts = Counter(vote.label for vote in given if vote.label in VALUES)
    if outcome.reason is MarkReason.MAJORITY:
        [(label, most), *others] = counts.most_common()
        assert VALUES[str(label)] == outcome.value
        assert all(count < most for _, count in others)
    shuffled = list(given)
    random.shuffle(shuffled)
    assert tally(shuffled) == outcome


def test_only_engines_that_are_out_of_service_are_an_outage():
    gone = BackendUnreachable("gone")
    assert outage([failed(gone), failed(NoBackendError("none"))]) is gone
    assert outage([failed(gone), LATE]) is None
    assert outage([failed(gone), *votes("1")]) is None
    assert outage([failed(PromptTooLong("too long"))]) is None
    assert outage([]) is None
