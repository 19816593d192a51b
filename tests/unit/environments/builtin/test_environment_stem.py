"""`stem` decides by rules what rules can decide, asks a judge for the rest, and never makes a zero of a failure."""

from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.builtin.stem.environment import (
    RuleVerdict,
    Stem,
    compare_choice,
    compare_quantity,
    differ_in_case,
    read_task,
    same_words,
)
from rollout_service.environments.builtin.stem.quantities import read_quantity
from rollout_service.environments.builtin.stem.units import read_unit
from rollout_service.environments.dataset_files import count_splits
from rollout_service.episodes import Score
from rollout_service.judging.contract import Judge, Judgment, NoVerdictError
from rollout_service.judging.rubric import Rubric
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import OtherModels, play
from rollout_service.testing.scripted_policy import ScriptedPolicy
from sandboxes import LocalConfig, make_provider

pytestmark = pytest.mark.slow
RIGHT, WRONG, UNDECIDED = RuleVerdict.RIGHT, RuleVerdict.WRONG, RuleVerdict.UNDECIDED
STEM = Stem()


class ScriptedJudge(Judge):
    """Gives one value, or raises an error, and remembers what it was asked."""

    def __init__(self, says: float | Exception) -> None:
        self.says = says
        self.asked: list[tuple[str, str]] = []

    async def ask(self, rubric: Rubric, instance: dict[str, JsonValue], **texts: str) -> Judgment:
        prompt = rubric.messages(instance, texts)[1].content
        self.asked.append((texts["answer"], prompt))
        if isinstance(self.says, Exception):
            raise self.says
        return Judgment(self.says, None, (), "judge@0", rubric.settings.name, "0")


@pytest.fixture
def score(tmp_path: Path) -> Callable[..., Any]:
    sandboxes = SandboxSource(make_provider(LocalConfig(provider="local"), tmp_path))

    async def score_one(task: dict[str, JsonValue], answer: str, judge: Judge | None = None) -> Score:
        trial = await play(STEM, task, ScriptedPolicy([answer]), sandboxes, OtherModels(judge))
        return trial.score

    return score_one


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("44.1 m", "44.1 m", RIGHT),
        ("44.1 m", "44 m", RIGHT),
        ("44.1 m", r"4410~\mathrm{cm}", RIGHT),
        ("44.1 m", "45 m", WRONG),
        ("44.1 m", "-44.1 m", WRONG),
        ("44.1 m", "44.1", UNDECIDED),
        ("44.1 m", "44.1 s", UNDECIDED),
        ("44.1 m", "44.1 blips", UNDECIDED),
        ("44.1 m", "about forty meters", UNDECIDED),
        ("240 kJ", r"2.4 \times 10^{5}\ \mathrm{J}", RIGHT),
        ("240 kJ", r"$E = 2.4\times10^5\,\text{kg}\,\text{m}^2/\text{s}^2$", RIGHT),
        ("10 N", r"10 kg \cdot m \cdot s^{-2}", RIGHT),
        ("8.314 J/(mol K)", "8.314 J mol^-1 K^-1", RIGHT),
        ("8.314 J/(mol K)", "8.314 J/mol K", UNDECIDED),
        ("4.7 kΩ", r"4700\,\Omega", RIGHT),
        ("4.7 k\u2126", "4700 \u03a9", RIGHT),
        ("3.14 rad/s", "30 rpm", UNDECIDED),
        ("1,500 rpm", "1.5e3 rpm", RIGHT),
        ("5 µm", r"5\,\mu\mathrm{m}", RIGHT),
        ("25%", r"25\%", RIGHT),
        ("25%", "0.25", RIGHT),
        ("25%", "25", UNDECIDED),
        ("90°", r"\pi/2", UNDECIDED),
        ("90°", "1.5708 rad", RIGHT),
        ("20 °C", "293 K", RIGHT),
        ("20 °C", "25 °C", WRONG),
        ("1,250 kg", "1.25 t", RIGHT),
        ("46", "46", RIGHT),
        ("46", "46.0", RIGHT),
        ("46", "46.2", WRONG),
        ("46", "46 chromosomes", UNDECIDED),
        ("46", r"46\%", UNDECIDED),
        ("46", r"46^\circ", UNDECIDED),
        ("46", "46/2", UNDECIDED),
        ("46", "46 * 2", UNDECIDED),
        ("46", "46 /", UNDECIDED),
        ("3 m", "3 m/2", UNDECIDED),
        ("3 m", "3 m(2)", UNDECIDED),
        ("2", r"2 \times 1000", UNDECIDED),
        ("3 W/(m^2 K)", "3 W/(K m^2)", RIGHT),
        ("1.5", "1.51", RIGHT),
        ("1e-4 mol/L", "10^{-4} M", RIGHT),
        ("0 J", "0.0 J", RIGHT),
        ("3 m", "3e999 m", UNDECIDED),
        ("3 m", "3 m or 4 m", UNDECIDED),
        ("3 m", "4 m = 3 m", UNDECIDED),
        ("3 m", "4 m or x = 3 m", UNDECIDED),
        ("3 m", "x = 4 m, y = 3 m", UNDECIDED),
        ("3 m", "2 = 3", UNDECIDED),
        ("3 m", "300 cm = 3.0 m", RIGHT),
        ("3 m", r"x = 6~\text{m} / 2 = 3~\text{m}", RIGHT),
        ("1,250 kg", "1,250 kg = 1.25 t", RIGHT),
        ("42", "41 = 42", UNDECIDED),
        ("3 m", "3 m^99", UNDECIDED),
        ("3 m", "__import__('os')", UNDECIDED),
    ],
)
def test_numbers_are_compared_in_their_units(gold, answer, verdict):
    quantity = read_quantity(gold)
    assert quantity is not None
    assert compare_quantity(quantity, answer) is verdict


def test_the_question_may_ask_for_a_unit_and_a_tolerance():
    gold, light_year = read_quantity("4.2"), read_unit("ly")
    assert gold is not None
    for answer, verdict in [("4.2", RIGHT), ("4.2 ly", RIGHT), ("3.97e13 km", RIGHT), ("5", WRONG)]:
        assert compare_quantity(gold, answer, unit=light_year) is verdict
    assert compare_quantity(gold, "4.5", 0.1) is RIGHT
    assert compare_quantity(gold, "4.2 kg", unit=light_year) is UNDECIDED


@pytest.mark.parametrize("text", ["1/2", "3 * 108", r"2 \times 1000 m", "1/2 m", "5 m //s"])
def test_arithmetic_is_not_a_quantity(text):
    assert read_quantity(text) is None


CHOICES = {"A": "mass", "B": "the momentum", "C": "energy"}


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ("B", RIGHT),
        ("b", RIGHT),
        ("(B)", RIGHT),
        ("B. the momentum", RIGHT),
        (r"\text{B}", RIGHT),
        ("$B$", RIGHT),
        (r"\mathbf{B}", RIGHT),
        (r"\textbf{(B)}\ \text{the momentum}", RIGHT),
        (r"\textbf{(B) the momentum}", RIGHT),
        (r"\text{Option B}", RIGHT),
        ("The Momentum.", RIGHT),
        (r"\text{the momentum}", RIGHT),
        (r"\textbf{(B) energy}", WRONG),
        ("A", WRONG),
        ("B and C", WRONG),
        ("B. the energy", WRONG),
        ("energy", WRONG),
        ("AB", WRONG),
        ("", WRONG),
    ],
)
def test_a_choice_is_its_letter_or_its_text(answer, verdict):
    assert compare_choice("B", answer, CHOICES) is verdict


def test_a_choice_is_told_from_others_by_signs_and_case():
    for choices in (
        ["AA", "Aa", "aa"],
        ["A → B", "A ← B", "A B"],
        [r"a \to b", r"a \leftarrow b", r"a \rightarrow b"],
        ["5 MW", "5 mW", "5 W"],
        ["n!", "n", "√n"],
    ):
        for letter, text in zip("ABC", choices, strict=True):
            assert compare_choice(letter, text, dict(zip("ABC", choices, strict=True))) is RIGHT
    assert compare_choice("A", "10 KM", {"A": "10 km", "B": "10 m"}) is RIGHT


def test_a_letter_alone_is_a_choice_and_not_the_text_of_another():
    blood = {"A": "O", "B": "A", "C": "B", "D": "AB"}
    assert [compare_choice(letter, letter, blood) for letter in blood] == [RIGHT] * 4
    assert compare_choice("C", "B", blood) is WRONG
    assert compare_choice("A", "O", blood) is RIGHT


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Mitosis", "mitosis.", True),
        ("Newton's law", "newton's Law", True),
        ("No", "no", True),
        ("Diels-Alder reaction", "diels-alder reaction", True),
        ("5 MW", "5 mW", False),
        ("A → B", "A ← B", False),
        ("n!", "n", False),
        ("(a, b)", "a, b", True),
        (r"\text{the \textbf{momentum}}", "The momentum.", True),
        (r"5\,\text{MW}", "5 MW", True),
        (r"\sqrt{g h}", r"\sqrt{g}  h", False),
        (r"\frac{q B}{m}", r"\frac{q}{B m}", False),
        (r"\Delta E", r"\delta E", False),
        ("v_x", "v x", False),
        ("(a, b)", "[a, b]", False),
        ("f'", "f", False),
        ("AaBb", "aabb", False),
        ("CO", "Co", False),
        ("G", "g", False),
    ],
)
def test_words_are_the_same_without_case_and_punctuation_that_mean_nothing(one, other, same):
    assert same_words(one, other) is same


@pytest.mark.parametrize(
    ("gold", "answer", "differ"),
    [
        (r"\frac{G M}{R}", r"\frac{G m}{R}", True),
        (r"\Delta E", r"\delta E", True),
        ("M - m", "m", False),
        (r"\frac{G M}{R}", r"\dfrac{GM}{R}", False),
        ("e^x", r"E = e^x", False),
        ("42", "x = 42", False),
    ],
)
def test_letters_of_another_case_are_other_letters(gold, answer, differ):
    assert differ_in_case(gold, answer) is differ


NUMBERS = st.text(alphabet="0123456789.eE+-*^/() mkgsJµ%°{}\\", max_size=40)


@given(st.text(max_size=60) | NUMBERS)
def test_any_text_is_a_finite_number_or_none(text):
    quantity = read_quantity(text)
    assert quantity is None or isfinite(quantity.value)


@given(st.text(max_size=60) | NUMBERS)
def test_a_text_is_read_as_a_whole_or_not_at_all(text):
    assert read_quantity(f"{text} ?") is None
    assert read_unit(f"{text} ?") is None


@given(st.floats(1e-6, 1e6), st.sampled_from([("km", "m", 1e3), ("h", "s", 3600), ("MPa", "N/m^2", 1e6)]))
def test_a_number_is_the_same_in_another_unit(value, units):
    big, small, factor = units
    quantity = read_quantity(f"{value!r} {big}")
    assert quantity is not None
    assert compare_quantity(quantity, f"{value * factor!r} {small}", 1e-9) is RIGHT
    assert compare_quantity(quantity, f"{value * factor * 1.1!r} {small}") is WRONG


async def test_every_shipped_task_is_right_with_its_own_answer_by_rule(score):
    tasks = STEM.dataset()
    assert set(count_splits(tasks)) == {"train", "held_out"}
    for task in tasks:
        found = await score(task, rf"So it is \boxed{{{task['answer']}}}.")
        assert (found.reward, found.parts["by_rule"]) == (1.0, 1.0), task


async def test_expressions_are_compared_by_math_verify_and_the_judge_has_the_last_word(score):
    task = {"question": "What is the energy?", "answer": r"\frac{1}{2} C V^2"}
    judge = ScriptedJudge(0.0)
    assert (await score(task, r"\boxed{C V^2 / 2}", judge)).parts["by_rule"] == 1.0
    assert judge.asked == []
    found = await score(task, r"\boxed{C V^2}", judge)
    assert (found.reward, found.parts) == (0.0, {"boxed": 1.0, "by_rule": 0.0})
    [(answer, prompt)] = judge.asked
    assert answer == r"C V^2"
    assert "What is the energy?" in prompt
    assert r"\frac{1}{2} C V^2" in prompt
    assert (await score({**task, "judge": False}, r"\boxed{C V^2}")).reward == 0.0
    assert (await score({**task, "judge": False}, r"\boxed{c V^2 / 2}")).reward == 0.0


async def test_a_unit_of_another_kind_than_the_question_asks_for_goes_to_the_judge(score):
    task = {"question": "How far?", "answer": "4.2", "unit": "ly"}
    judge = ScriptedJudge(0.0)
    assert (await score(task, r"\boxed{4.2 kg}", judge)).reward == 0.0
    assert [answer for answer, _ in judge.asked] == ["4.2 kg"]
    assert (await score(task, r"\boxed{\frac{42}{10}}", judge)).reward == 1.0


async def test_words_go_to_the_judge_unless_they_are_the_same(score):
    task = {"question": "Which gas?", "answer": "hydrogen gas"}
    assert (await score(task, r"\boxed{Hydrogen  gas.}")).reward == 1.0
    judge = ScriptedJudge(1.0)
    assert (await score(task, r"\boxed{H_2}", judge)).reward == 1.0
    assert [answer for answer, _ in judge.asked] == ["H_2"]


async def test_without_a_box_nobody_is_asked(score):
    judge = ScriptedJudge(1.0)
    for answer in ("It is hydrogen.", r"\boxed{}", ""):
        found = await score({"question": "Which gas?", "answer": "hydrogen"}, answer, judge)
        assert (found.reward, found.parts) == (0.0, {"boxed": 0.0})
    assert judge.asked == []


async def test_a_judge_that_fails_or_is_not_there_is_not_a_zero(score):
    task = {"question": "Which gas?", "answer": "hydrogen"}
    with pytest.raises(NoVerdictError):
        await score(task, r"\boxed{H_2}", ScriptedJudge(NoVerdictError("it said nothing")))
    with pytest.raises(EnvironmentFailedError, match="a judge is needed"):
        await score(task, r"\boxed{H_2}")


async def test_rows_of_published_data_sets_are_tasks(score):
    row = {
        "domain": "physics",
        "problem": "How far?",
        "matched_solution": r"d = vt, so \boxed{12 m}",
        "id": 7,
    }
    assert (await score(row, r"\boxed{1200 cm}")).reward == 1.0
    without_box = {
        "problem": "Why?",
        "matched_solution": "Because of the angular momentum 3.",
        "answer": None,
    }
    judge = ScriptedJudge(1.0)
    assert read_task({**row, "answer": 12.5}).answer == "12.5"
    del without_box["answer"]
    assert (await score(without_box, r"\boxed{angular momentum}", judge)).reward == 1.0
    assert "Because of the angular momentum 3." in judge.asked[0][1]


@pytest.mark.parametrize(
    ("instance", "path"),
    [
        ({}, "instance.question"),
        ({"question": "?"}, "instance.answer"),
        ({"question": "?", "answer": ""}, "instance.answer"),
        ({"question": "?", "answer": "E", "choices": ["a", "b"]}, "instance"),
        ({"question": "?", "answer": "AB", "choices": ["a", "b"]}, "instance"),
        ({"question": "?", "answer": " ", "choices": ["a", "b"]}, "instance"),
        ({"question": "?", "answer": "A", "kind": "choice"}, "instance"),
        ({"question": "?", "answer": "much", "kind": "number"}, "instance"),
        ({"question": "?", "answer": "3", "unit": "blips"}, "instance"),
        ({"question": "?", "answer": "3", "tolerance": -1}, "instance.tolerance"),
        ({"question": "?", "answer": "3", "kind": "numbr"}, "instance.kind"),
    ],
)
def test_a_task_that_cannot_be_scored_is_refused_by_its_field(instance, path):
    with pytest.raises(InvalidFieldError) as caught:
        STEM.check(instance)
    assert path in {field.path for field in caught.value.fields}


def test_the_prompt_shows_the_choices_and_the_unit():
    instance: dict[str, JsonValue] = {"question": "Which?", "answer": "B", "choices": ["mass", "energy"]}
    assert STEM.messages(instance)[1].content == "Which?\n\nA. mass\nB. energy"
    instance = {"problem": "How far?", "answer": "4.2", "unit": "ly"}
    assert STEM.messages(instance)[1].content == "How far?\n\nGive the number in ly."
