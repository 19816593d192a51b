"""Benchmarks count what took place: no attack that failed at once, and no answer that was compared with another."""

from contextlib import aclosing
from importlib import import_module
from pathlib import Path

import anyio
import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _found(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # benchmarks find each other there


async def test_an_attack_that_ends_at_once_has_no_figures(provider):
    neighbors = import_module("neighbors")
    async with aclosing(neighbors.Attacker(provider, "spin", neighbors.in_shell("no-such-program"))) as attacker:
        with pytest.raises(ExceptionGroup) as failed, anyio.fail_after(60):
            async with attacker.attacking():
                await anyio.sleep_forever()
    assert failed.group_contains(RuntimeError, match="the attack spin ended at once: .*not found")


def test_turns_after_a_lost_answer_are_compared_with_their_own():
    users, trainer = import_module("support.live.users"), import_module("support.live.trainer")
    clock = users.Clock(ordered=1)
    user = users.User("s", "", {}, clock, requests=3)
    user.answers = [users.Answer(text, 1, 1, 0.0, 0.0) for text in ("one.", "three.")]
    seen = trainer.Trainer(None, clock)

    def deliver(turn: int, text: str, version: int = 1) -> None:
        ids = seen._tokenizer.encode(text, add_special_tokens=False).ids
        seen._check(user, turn, [(token, version) for token in ids])

    for turn, text in enumerate(("one.", "two.", "three.")):
        deliver(turn, text)
    assert seen.wrong == []
    deliver(2, "three.", version=0)
    deliver(1, "one more that was not read")
    assert [line.split(":")[0] for line in seen.wrong] == ["turn 2 of s", "turn 1 of s"]
