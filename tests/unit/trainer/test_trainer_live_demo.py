"""The demonstration's judge reads what users say from the service's own prompts, and its figures are the users'."""

import importlib.util
import sys
from pathlib import Path

import anyio
import pytest
from trainer.live.judge import RuleJudge
from trainer.live.users import Exchange, Pace

from rollout_service.engines.shipped import policy_folder
from rollout_service.judging.contract import Vote, VoteOutcome
from rollout_service.live.contract import NextStateRecord
from rollout_service.live.judging.factory import HEADER, candidates
from rollout_service.live.judging.prompt import hint_rubric, question, value_rubric
from rollout_service.settings.live import LiveJudgeSettings
from rollout_service.tokens import ChatRenderer
from training.live import talk

pytestmark = pytest.mark.torch

EXAMPLE = Path(__file__).parents[3] / "examples" / "live_demo.py"
FOLDER = policy_folder("live-base")
SUM = talk.Question("what is 3+4?", "7")


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("live_demo", EXAMPLE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(rubric, answer: str, said: str) -> str:
    """Return the judge's answer to the service's prompt about a turn."""
    renderer, judge = ChatRenderer.load(FOLDER), RuleJudge(FOLDER)
    state = NextStateRecord(role="user", text=f"[user]\n{said}", arrived_at=0.0)
    messages = rubric.messages(*question(answer, state))
    ids = judge.reply(renderer.render(messages), 1_024).ids
    return renderer.decode(ids).removesuffix("<|im_end|>")


@pytest.mark.parametrize(
    ("said", "value"),
    [
        (f"{talk.THANKS}what is 1+1?", "1"),
        (f"{talk.complaint('=')}what is 1+1?", "-1"),
        (f"{talk.WRONG}what is 1+1?", "-1"),
        ("what is 1+1?", "0"),
    ],
)
def test_the_judge_values_what_the_user_says(said, value):
    rubric = value_rubric(LiveJudgeSettings())
    assert rubric.read(ask(rubric, "thanks. \\boxed{1}", said)) == value


def test_a_complaint_becomes_a_hint_that_the_policy_was_taught():
    rubric = hint_rubric(LiveJudgeSettings())
    said = ask(rubric, "7.", f"{talk.complaint('=')}what is 1+1?")
    assert candidates([Vote(VoteOutcome.VALID, rubric.read(said), text=said)]) == [talk.hint("=")]
    assert talk.HINT_HEADER == HEADER


@pytest.mark.parametrize("reaction", [talk.THANKS, talk.WRONG, ""])
def test_what_names_no_ending_gives_no_hint(reaction):
    rubric = hint_rubric(LiveJudgeSettings())
    assert rubric.read(ask(rubric, "7.", f"{reaction}what is 1+1?")) == "-1"


@pytest.mark.parametrize(
    ("answer", "satisfied", "right"), [("7=", 1, 1), ("7.", 0, 1), ("8=", 0, 0), ("", 0, 0), ("7", 0, 0)]
)
def test_a_user_wants_right_answers_with_one_ending(answer, satisfied, right):
    exchange = Exchange(SUM, answer)
    assert (exchange.satisfied, exchange.right) == (satisfied, right)


async def test_users_wait_for_the_trainer():
    pace = Pace(ahead=2)
    await pace.begin()
    await pace.begin()
    with anyio.move_on_after(0.01) as waited:
        await pace.begin()
    assert waited.cancelled_caught
    pace.train(1)
    await pace.begin()


def points(*satisfied: float) -> list[dict[str, float]]:
    return [{"step": float(step), "satisfied": share, "minutes": 1.0} for step, share in enumerate(satisfied)]


def test_training_ends_when_users_stay_satisfied_or_time_is_up(demo):
    plan = demo.Plan(updates=8, minutes=2.0, users=1, sessions=1, guests=1, seed=0)
    assert not demo.is_done(points(1, 1, 1, 1), plan)
    assert demo.is_done(points(0, 1, 1, 1, 1, 1), plan)
    assert not demo.is_done(points(0, 1, 1, 1, 1), plan)
    assert demo.is_done(points(*[0] * 8), plan)
    assert demo.is_done([{"satisfied": 0.0, "minutes": 2.0}], plan)


def test_the_figures_are_those_of_the_first_arm_with_the_ends_of_the_others(demo):
    good, bad = Exchange(SUM, "7="), Exchange(SUM, "7.")
    outcomes = {
        "binary": demo.Outcome([bad, bad], [good, good], points(0.0, 1.0), 3.0, {}),
        "shuffled": demo.Outcome([bad, bad], [good, bad], points(0.0), 1.0, {}),
    }
    found = demo.summary(outcomes)
    assert found.pop("arms")["shuffled"]["final_right"] == 1.0
    assert found == {
        "start_satisfied": 0.0,
        "final_satisfied": 1.0,
        "updates": 2,
        "minutes": 3.0,
        "shuffled_satisfied": 0.5,
    }
