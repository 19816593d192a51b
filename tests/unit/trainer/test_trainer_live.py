"""The trainer learns from live sessions, and its demonstration shows how."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer.learner import Learner, Recipe
from trainer.live.baseline import RunningMeans
from trainer.live.judge import RuleJudge
from trainer.live.losses import BINARY, COMBINED, DISTILLATION, LiveLoss, Weights
from trainer.live.teacher import CANDIDATES
from trainer.live.turns import shuffled_values, turns_of
from trainer.live.users import Exchange, Pace
from trainer.policy import Sample, distributions, sampled_logprobs

from api_schemas.rollouts.sessions import Hint, MaskReason, Teacher, TurnKind, TurnMark
from api_schemas.trajectories import Trajectory
from rollout_service.engines.shipped import policy_folder
from rollout_service.judging.contract import Vote, VoteOutcome
from rollout_service.live.contract import NextStateRecord
from rollout_service.live.judging.factory import HEADER, candidates
from rollout_service.live.judging.stage import hint_rubric, question, value_rubric
from rollout_service.settings.live import LiveJudgeSettings
from rollout_service.testing import Shape, write_random_checkpoint
from rollout_service.tokens import ChatRenderer
from tests.support.adapters.session_batches import PlayedPart, session_batch
from tests.support.samples import segment
from training.live import talk

pytestmark = pytest.mark.torch

SHAPE = Shape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=48, vocab=300, context=600)
RECIPE = Recipe(learning_rate=1e-2, warm_up=1, updates=1, discouragement=1.0)
NO_BASELINE = Weights(baseline=False)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model") / "base", SHAPE)


@pytest.fixture
def learner(base) -> Learner:
    return Learner(base, RECIPE)


def trajectory(sizes: list[int], *, seed: int = 0) -> Trajectory:
    """Return one segment with a turn of each size, three tokens of context before each."""
    random = np.random.default_rng(seed)
    mask = [bit for size in sizes for bit in [0] * 3 + [1] * size]
    turns = [turn if bit else -1 for turn, size in enumerate(sizes) for bit in [0] * 3 + [1] * size]
    ids = random.integers(3, SHAPE.vocab, len(mask)).tolist()
    logprobs, versions = [-1.5 * bit for bit in mask], [bit - 1 for bit in mask]
    one = segment(ids, mask, logprobs=logprobs, versions=versions, turn_ids=turns)
    return Trajectory(segments=[one], messages=[], finish_reasons=[], fork_counts={})


def mark(turn: int, value: float | None = 1.0, **more) -> TurnMark:
    return TurnMark(turn=turn, usable=True, value=value, **more)


def hint(*prompt: int) -> Hint:
    return Hint(text="Hint: use =", prompt_ids=list(prompt), candidates=1, selected_by="longest")


def teacher(*logprobs: float) -> Teacher:
    return Teacher(model="policy@1", logprobs=list(logprobs))


def part(sizes: list[int], *marks: TurnMark, user: str = "u1", seed: int = 0, usable: bool = True) -> PlayedPart:
    return PlayedPart(trajectory(sizes, seed=seed), marks, user, usable)


def old(learner: Learner, sample: Sample) -> np.ndarray:
    """Return the log-probabilities of the sample's tokens by the trainer's own weights."""
    with torch.no_grad():
        return sampled_logprobs(learner.model, [sample], 1.0)[0].numpy()


def everywhere(learner: Learner, sample: Sample) -> np.ndarray:
    """Return the log-probabilities of the whole vocabulary in the place of each of the sample's tokens."""
    with torch.no_grad():
        return distributions(learner.model, [sample], 1.0)[0].numpy()


def test_every_token_of_a_turn_gets_its_value_and_no_other_token_any(learner):
    batch = session_batch([part([2, 3, 1], mark(0, -1.0), mark(2, 0.5))])
    [sample] = LiveLoss(NO_BASELINE).samples(batch, learner.model)
    assert sample.advantages.tolist() == [-1.0, -1.0, 0.5]
    assert np.flatnonzero(sample.mask).tolist() == [3, 4, 14]
    assert sample.behavior.tolist() == [-1.5] * 3
    assert sample.versions.tolist() == [0] * 3


def test_unusable_turns_and_samples_are_left_out(learner):
    side = TurnMark(turn=1, kind=TurnKind.SIDE, usable=False, masked_because=MaskReason.SIDE)
    batch = session_batch([part([2, 2], mark(0), side), part([2], mark(0), usable=False), part([2], seed=3)])
    [sample] = LiveLoss(NO_BASELINE).samples(batch, learner.model)
    assert np.flatnonzero(sample.mask).tolist() == [3, 4]


def test_a_value_counts_by_its_distance_to_what_is_usual(learner):
    batch = session_batch([part([1, 1, 1, 1], mark(0), mark(1, -1.0), mark(2, -1.0), mark(3, -1.0))])
    loss = LiveLoss(BINARY)
    [sample] = loss.samples(batch, learner.model)
    assert sample.advantages.tolist() == [1.5, -0.5, -0.5, -0.5]
    assert loss.means.of("u1") == -0.5


def test_what_is_usual_is_known_for_each_user(learner):
    glad, cross = part([1, 1], mark(0), mark(1), user="glad"), part([1], mark(0, -1.0), user="cross")
    samples = LiveLoss(BINARY).samples(session_batch([glad, cross]), learner.model)
    assert [sample.advantages.tolist() for sample in samples] == [[0.0, 0.0], [0.0]]


def test_a_batch_without_values_has_nothing_to_learn_from(learner):
    batch = session_batch([part([2], mark(0, None))])
    assert LiveLoss(BINARY).samples(batch, learner.model) == []
    assert learner.step([])["tokens"] == 0.0


def test_distillation_is_the_difference_to_the_teacher_cut_off(learner):
    [context] = LiveLoss(NO_BASELINE).samples(session_batch([part([3], mark(0))]), learner.model)
    before = old(learner, context)
    said = before + np.array([0.25, 5.0, -5.0], np.float32)
    batch = session_batch([part([3], mark(0, -1.0, teacher=teacher(*said.tolist())))])
    [sample] = LiveLoss(DISTILLATION).samples(batch, learner.model)
    np.testing.assert_allclose(sample.advantages, [0.25, 2.0, -2.0], atol=1e-5)


def test_the_policy_itself_teaches_from_the_hinted_prompt(learner):
    played = part([2, 3], mark(0), mark(1, -1.0, hint=hint(7, 8, 9, 10)))
    [segment] = played.trajectory.segments
    [sample] = LiveLoss(DISTILLATION).samples(session_batch([played]), learner.model)
    assert np.flatnonzero(sample.mask).tolist() == [8, 9, 10]  # the turn without a hint is not trained on
    ids = np.array([7, 8, 9, 10, *segment.token_ids[-3:]], np.int32)
    hinted = everywhere(learner, replace(sample, token_ids=ids, mask=np.arange(7) >= 4))
    before = everywhere(learner, sample)
    for place in range(3):
        liked = np.argsort(-before[place])[:CANDIDATES]
        better = np.clip(hinted[place][liked] - before[place][liked], -2.0, 2.0)
        shares = np.exp(before[place][liked]) / np.exp(before[place][liked]).sum()
        mine = sample.support.places == place
        assert sample.support.token_ids[mine].tolist() == liked.tolist()
        np.testing.assert_allclose(sample.support.advantages[mine], shares * better, atol=1e-5)
        np.testing.assert_allclose(sample.support.logprobs[mine], before[place][liked], atol=1e-5)


def test_a_hint_that_changes_nothing_teaches_nothing(learner):
    played = part([3], mark(0, -1.0))
    [segment] = played.trajectory.segments
    same = mark(0, -1.0, hint=hint(*segment.token_ids[:3]))
    [sample] = LiveLoss(DISTILLATION).samples(session_batch([replace(played, marks=[same])]), learner.model)
    np.testing.assert_allclose(sample.support.advantages, 0.0, atol=1e-5)
    assert sample.advantages.tolist() == [0.0] * 3


def test_tokens_that_were_not_sampled_are_learned_from_a_hint(base):
    """A hint follows a bad answer: what it asks for was not sampled, and must become likelier all the same."""
    played = part([1], mark(0, -1.0))
    batch = session_batch([played])
    learner = Learner(base, RECIPE)
    [sample] = LiveLoss(NO_BASELINE).samples(batch, learner.model)
    before = everywhere(learner, sample)[0]
    wanted = int(np.argsort(-before)[4])
    sampled = int(sample.token_ids[3])
    said = Teacher(model="policy@1", logprobs=[-9.0], top_ids=[[wanted, sampled]], top_logprobs=[[-0.01, -9.0]])
    [sample] = LiveLoss(DISTILLATION).samples(
        session_batch([replace(played, marks=[mark(0, -1.0, teacher=said)])]), learner.model
    )
    learner.step([sample])
    after = everywhere(learner, sample)[0]
    assert after[wanted] > before[wanted] + 0.01
    assert after[sampled] < before[sampled] - 0.01


def test_a_turn_with_a_value_and_a_hint_is_one_sample(learner):
    hinted = mark(1, -1.0, hint=hint(7, 8, 9))
    batch = session_batch([part([2, 3], mark(0), hinted)])
    [alone] = LiveLoss(DISTILLATION).samples(batch, learner.model)
    [both] = LiveLoss(replace(COMBINED, baseline=False)).samples(batch, learner.model)
    assert both.advantages.tolist() == [1.0, 1.0, -1.0, -1.0, -1.0]
    assert both.mask.sum() == 5
    assert set(alone.support.places) == {0, 1, 2}
    assert set(both.support.places) == {2, 3, 4}  # the same tokens, after those of the first turn
    np.testing.assert_allclose(both.support.advantages, alone.support.advantages, atol=1e-5)


def test_a_value_and_a_teacher_of_the_sampled_tokens_add_up(learner):
    [context] = LiveLoss(NO_BASELINE).samples(session_batch([part([2], mark(0))]), learner.model)
    said = old(learner, context) + np.float32(0.5)
    batch = session_batch([part([2], mark(0, -1.0, teacher=teacher(*said.tolist())))])
    [sample] = LiveLoss(replace(COMBINED, baseline=False, hint=2.0)).samples(batch, learner.model)
    np.testing.assert_allclose(sample.advantages, [0.0, 0.0], atol=1e-5)


@pytest.mark.parametrize("logprobs", [[], [-1.0], [-1.0] * 4])
def test_a_teacher_of_another_length_is_dropped_and_counted(learner, logprobs):
    batch = session_batch([part([3], mark(0, -1.0, teacher=teacher(*logprobs), hint=hint(7, 8)))])
    loss = LiveLoss(replace(COMBINED, baseline=False))
    [sample] = loss.samples(batch, learner.model)
    assert sample.advantages.tolist() == [-1.0] * 3  # its value is left
    assert loss.dropped == {"teacher_length": 1}
    assert LiveLoss(DISTILLATION).samples(batch, learner.model) == []


def test_shuffled_values_are_the_same_values_at_other_turns():
    marks = [mark(turn, float(turn % 2)) for turn in range(20)]
    turns = turns_of(session_batch([part([1] * 20, *marks)]))
    mixed = shuffled_values(turns, 1)
    assert sorted(turn.mark.value for turn in mixed) == sorted(turn.mark.value for turn in turns)
    assert [turn.mark.value for turn in mixed] != [turn.mark.value for turn in turns]
    assert [turn.tokens.tolist() for turn in mixed] == [turn.tokens.tolist() for turn in turns]
    assert mixed == shuffled_values(turns, 1)


def test_a_step_makes_good_turns_likelier_and_bad_ones_less(learner):
    batch = session_batch([part([4, 4], mark(0, 1.0), mark(1, -1.0))])
    samples = LiveLoss(NO_BASELINE).samples(batch, learner.model)
    before = old(learner, samples[0])
    figures = learner.step(samples)
    change = old(learner, samples[0]) - before
    assert change[:4].mean() > 0.01
    assert change[4:].mean() < -0.01
    assert figures["tokens"] == 8


@given(batches=st.lists(st.lists(st.floats(-1, 1), max_size=20), max_size=12), memory=st.floats(1, 64))
def test_a_running_mean_lies_among_its_values_and_survives_a_restart(batches, memory):
    means = RunningMeans(memory)
    for values in batches:
        means.update({"u": values})
    seen = [value for values in batches for value in values]
    assert min(seen, default=0.0) - 1e-9 <= means.of("u") <= max(seen, default=0.0) + 1e-9
    again = RunningMeans(memory)
    again.restore(means.state())
    assert again == means


def test_a_running_mean_forgets_what_is_long_ago():
    means = RunningMeans(memory=8)
    means.update({"u": [-1.0] * 100})
    for _ in range(20):
        means.update({"u": [1.0] * 4})
    assert means.of("u") > 0.9


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
