"""The reference trainer's environments, data, arms and controls."""

import importlib.util
import random
import re
import sys
from collections import Counter
from importlib.metadata import Distribution
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer.control import shuffled
from trainer.dividing import NEVER, Dividing, advantages_of, division_of

from api_schemas.runs import Advantages
from rollout_client.arrays import BatchArrays
from rollout_service.engines.shipped import policy_folder
from rollout_service.environments.builtin.calc import evaluate_expression
from rollout_service.environments.registry import EnvironmentRegistry
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import play
from rollout_service.testing import Shape, write_random_checkpoint
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from rollout_service.tokens import ChatRenderer
from sandboxes import LocalConfig, make_provider
from tests.support.adapters.trainer_batches import write_batch
from training.data import Example, Examples
from training.live import talk
from training.live.task import MAX_TURNS, LiveTask, session

FOLDER = Path(__file__).parents[3] / "examples" / "environments" / "arithmetic"
NUMBER = st.integers(0, 9999).map(str)
EXPRESSIONS = st.builds(
    lambda first, rest: first + "".join(map("".join, rest)),
    NUMBER,
    st.lists(st.tuples(st.sampled_from("+-*"), NUMBER), max_size=4),
)


PLUG_INS = Distribution.at(FOLDER / "arithmetic_environments-1.0.dist-info").entry_points


def load():
    """Load the plug-in's module without its folder on the path, where other tests would find its environments."""
    spec = importlib.util.spec_from_file_location("arithmetic_environments", FOLDER / "arithmetic_environments.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


arithmetic = load()


async def trial(folder: Path, name: str, question: str, answer: str, *said: str):
    """Play a rollout whose policy asks for these expressions, one per turn, and then gives the answer."""
    registry = EnvironmentRegistry.load(plugins=PLUG_INS)
    provider = make_provider(LocalConfig(provider="local"), folder)
    policy = ScriptedPolicy([*(turn("", call("python", code=f"print({each})")) for each in said), answer])
    instance = {"question": question, "answer": "14"}
    try:
        played = await play(registry.get(name), instance, policy, SandboxSource(provider))
    finally:
        await provider.close()
    return played, [message.content for message in policy.messages if message.role == "tool"]


async def test_the_steps_tool_must_be_called_for_each_operation(tmp_path):
    played, told = await trial(tmp_path, "steps", "2+3*4", "\\boxed{14}", "2+3*4", "2+3*4", "2+3*4")
    assert told == [arithmetic.KILLED, "14", "14"]
    assert played.score.reward == 1.0


async def test_another_expression_starts_over(tmp_path):
    _, told = await trial(tmp_path, "steps", "2+3*4", "?", "2+3*4", "9-3-1", "9-3-1", "0007", "__import__('os')")
    assert told[:4] == [arithmetic.KILLED, arithmetic.KILLED, "5", "7"]
    assert "SyntaxError" in told[4]


async def test_slow_gives_the_whole_result_at_once(tmp_path, monkeypatch):
    registry = EnvironmentRegistry.load(plugins=PLUG_INS)
    assert {each.spec.name for each in registry.list()} == {"slow", "steps"}
    monkeypatch.setattr(arithmetic, "TYPICAL_SECONDS", 0.0)
    played, told = await trial(tmp_path, "slow", "2+3*4", "\\boxed{14}", "2 + 3*4")
    assert told == ["14"]
    assert played.score.reward == 1.0


@pytest.mark.slow
async def test_the_tasks_have_two_operations_and_two_sides():
    tasks = arithmetic.steps.dataset()
    sides = {name: [each for each in tasks if each["split"] == name] for name in ("train", "held_out")}
    assert len(sides["train"]) == 2048
    assert len(sides["held_out"]) == 128
    for each in tasks:
        arithmetic.steps.check(each)
        expression = re.search(r"\d+(\s*[-+*]\s*\d+)+", each["question"])
        assert len(re.findall(r"[-+*]", expression[0])) == 2


@given(EXPRESSIONS)
def test_operation_by_operation_is_the_value(expression):
    left, calls = expression, 0
    while not arithmetic.is_number(left):
        left = re.sub(
            r"\$\(\((.+)\)\)",
            lambda match: str(evaluate_expression(match[1])),
            arithmetic.next_operation(left),
        )
        calls += 1
    assert int(left) == evaluate_expression(expression)
    assert calls == len(re.findall(r"[-+*]", expression))


TUNED = policy_folder("calc-tuned")


def learned(example: Example) -> str:
    """Return the text that the policy is taught to write."""
    ids = [token for token, bit in zip(example.token_ids, example.loss_mask, strict=True) if bit]
    return ChatRenderer.load(TUNED).decode(ids)


def some(guesses: float, count: int = 4) -> list[str]:
    batches = islice(Examples(TUNED, 3, guesses=guesses).batches(16), count)
    return [learned(example) for batch in batches for example in batch]


def test_without_guesses_every_example_calls_the_tool_and_answers():
    texts = some(0.0)
    assert all("<tool_call>" in text for text in texts)
    assert all(re.search(r"\\boxed\{-?\d+\}<\|im_end\|>$", text) for text in texts)


def test_a_guess_answers_at_once():
    assert all(re.fullmatch(r"\\boxed\{-?\d+\}<\|im_end\|>", text) for text in some(1.0))


def test_batches_mix_both():
    for batch in islice(Examples(TUNED, 4, guesses=0.5).batches(32), 4):
        calls = sum("<tool_call>" in learned(example) for example in batch)
        assert calls == pytest.approx(16, abs=12)


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer.load(policy_folder("live-base"))


def exchanges(renderer, *, count: int = 100, seed: int = 0) -> list[tuple[str, str]]:
    """Return messages of users, each with what the policy is taught to answer."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        text = renderer.decode(session(renderer, rng.randint(1, MAX_TURNS), rng).token_ids)
        turns = re.findall(r"user\n(.*?)<\|im_end\|>\n<\|im_start\|>assistant\n(.*?)<\|im_end\|>", text, re.DOTALL)
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


EXAMPLE = Path(__file__).parents[3] / "examples" / "train_parl.py"


@pytest.fixture(scope="module")
def arms():
    spec = importlib.util.spec_from_file_location("train_parl", EXAMPLE)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_annealed_weights_fall_to_nothing_and_constant_ones_stay():
    assert Dividing().order() is None
    annealed, constant = Dividing("annealed", anneal=4).order(), Dividing("constant").order()
    assert (annealed.length, annealed.lambda1.end, annealed.lambda2.end) == (4, 0.0, 0.0)
    assert (constant.length, constant.lambda1.end, constant.lambda2.end) == (NEVER, 0.3, 0.2)


def test_advantages_keep_the_scale_of_the_weights():
    assert advantages_of("pointers") is Advantages.LEAVE_ONE_OUT
    assert advantages_of("calc") is Advantages.GROUP_NORM


def test_rollouts_without_sub_agents_have_no_division():
    assert division_of([]) == {}


def test_the_updates_to_a_reward_are_counted_to_the_last_of_three(arms):
    assert arms.updates_to([0.1, 0.7, 0.8, 0.8]) == 4
    assert arms.updates_to([0.9, 0.9]) is None
    assert arms.updates_to([0.2] * 9) is None


@pytest.mark.slow
def test_an_arm_without_a_good_reward_in_every_seed_has_no_median(arms):
    good = [{"reward": 0.8}] * 3
    trainings = [
        arms.Training("none", seed, {"final_reward": 0.5 + seed / 10}, points)
        for seed, points in enumerate([good, good[:1]])
    ]
    found = arms.summary(trainings)
    assert found["updates_to_075"] is None
    assert found["updates_to_075_of_seeds"] == [3, None]
    assert found["final_perf"] == pytest.approx(0.55)
    assert found["start_perf"] is None


def test_the_curve_of_an_arm_goes_as_far_as_all_of_its_seeds(arms):
    trainings = [
        arms.Training("none", seed, {}, [{"step": step, "reward": float(seed)} for step in range(1, 3 + seed)])
        for seed in range(2)
    ]
    assert arms.mean_curve(trainings) == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5}]


SHAPE = Shape(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate=16, vocab=300, context=64)
GROUPS, SAMPLES = 4, 8
UNUSABLE, UNSCORED = 3, 12


@pytest.fixture(scope="module")
def arrays(tmp_path_factory) -> BatchArrays:
    """A batch whose first two groups failed and whose others did not, with a sample that failed and one left out."""
    folder = tmp_path_factory.mktemp("batch")
    model = write_random_checkpoint(folder / "model", SHAPE)
    batch = BatchArrays.from_file(write_batch(Path(folder / "batch"), model, groups=GROUPS, samples=SAMPLES))
    rewards = np.repeat([0.0, 0.25, 0.75, 1.0], SAMPLES).astype("<f4")
    usable = np.ones(GROUPS * SAMPLES, "u1")
    usable[[UNUSABLE, UNSCORED]] = 0
    rewards[UNSCORED] = np.nan
    return BatchArrays(batch.batch, {**batch.tensors, "rewards": rewards, "usable": usable})


def scored(arrays: BatchArrays) -> np.ndarray:
    return np.delete(arrays.tensors["rewards"], [UNUSABLE, UNSCORED])


def test_the_rewards_of_usable_samples_change_places_across_groups(arrays):
    found = shuffled(arrays, 1)
    assert sorted(scored(found)) == sorted(scored(arrays))
    assert np.isnan(found.tensors["rewards"][[UNUSABLE, UNSCORED]]).all()
    assert np.isnan(found.tensors["advantages"][[UNUSABLE, UNSCORED]]).all()
    spread = [np.nanstd(group) for group in found.tensors["rewards"].reshape(GROUPS, SAMPLES)]
    assert min(spread) > 0.0  # within each group of the batch, all samples had the same reward
    assert found.tensors["token_ids"] is arrays.tensors["token_ids"]


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        (Advantages.GROUP_NORM, lambda group: (group - np.nanmean(group)) / np.nanstd(group)),
        (Advantages.LEAVE_ONE_OUT, lambda group: (group - np.nanmean(group)) * 7 / 6),
    ],
)
def test_advantages_follow_from_the_rewards_of_their_group(arrays, kind, formula):
    found = shuffled(arrays, 1, kind).tensors
    first = slice(0, SAMPLES)  # in which 7 samples have a reward
    np.testing.assert_allclose(found["advantages"][first], formula(found["rewards"][first]), rtol=1e-5)


def test_the_seed_and_the_batch_decide(arrays):
    next_batch = BatchArrays(arrays.batch.model_copy(update={"number": 1}), arrays.tensors)
    first, again, *others = (
        shuffled(each, seed).tensors["rewards"]
        for each, seed in ((arrays, 1), (arrays, 1), (arrays, 2), (next_batch, 1))
    )
    np.testing.assert_array_equal(first, again)
    assert not any(np.array_equal(first, other, equal_nan=True) for other in others)


def test_shuffled_rewards_do_not_depend_on_the_samples(arrays):
    correlations = [np.corrcoef(scored(arrays), scored(shuffled(arrays, seed)))[0, 1] for seed in range(200)]
    assert abs(np.mean(correlations)) < 0.05  # each varies by 0.18 around 0, so their mean varies by 0.013
