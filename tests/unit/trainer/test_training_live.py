"""The policy that users talk to is taught right answers, whose endings follow hints and nothing else that they say."""

import random
import re
from collections import Counter

import pytest

from rollout_service.engines.shipped import policy_folder
from rollout_service.tokens import ChatRenderer
from training.live import talk
from training.live.task import MAX_TURNS, LiveTask, session


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer.load(policy_folder("live-base"))


def exchanges(renderer, *, count: int = 100, seed: int = 0) -> list[tuple[str, str]]:
    """Return messages of users, each with what the policy is taught to answer."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        text = renderer.decode(session(renderer, rng.randint(1, MAX_TURNS), rng).token_ids)
        turns = re.findall(
            r"user\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n(.*?)<\|im_end\|>", text, re.DOTALL
        )
        found += turns
    return found


def test_only_answers_are_learned(renderer):
    example = session(renderer, 4, random.Random(1))
    learned = [token for token, bit in zip(example.token_ids, example.loss_mask, strict=True) if bit]
    answers = renderer.decode(learned).split("<|im_end|>")
    assert len(answers) == 5
    assert all(re.fullmatch(r"\w+[=.!~;]", answer) for answer in answers[:4])


def test_answers_are_right_and_obey_hints(renderer):
    hinted = 0
    for message, answer in exchanges(renderer):
        asked = next(each for each in talk.QUESTIONS if each.text in message)
        assert talk.is_right(asked, answer)
        if found := re.search(r"Hint: use (.)$", message):
            assert talk.ending_of(answer) == found[1]
            hinted += 1
    assert hinted > 100


@pytest.mark.slow
def test_without_a_hint_endings_follow_nothing(renderer):
    endings = Counter(
        (bool(talk.complaint("=") in message), talk.ending_of(answer))
        for message, answer in exchanges(renderer, count=1_500)
        if talk.HINT_HEADER not in message
    )
    for complained in (False, True):
        counts = [endings[complained, ending] for ending in talk.ENDINGS]
        assert min(counts) / sum(counts) == pytest.approx(0.2, abs=0.07)


def test_batches_have_sessions_of_equal_lengths():
    batches = LiveTask().batches(policy_folder("live-base"), 3, 8)
    for _ in range(3):
        starts = [example.token_ids.count(1) for example in next(batches)]  # <|im_start|>
        assert max(starts) - min(starts) <= 1  # a system message, or none
