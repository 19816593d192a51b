r"""`stem`: questions of science and engineering with one answer in \boxed{}.

Rules decide first: choices by their letter, numbers by their unit and tolerance, expressions by math-verify; a judge
decides the rest. An answer without a box is wrong. One that nobody can decide fails the rollout: it is never a zero.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Final, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from api_schemas.errors import FieldError
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.builtin.math.environment import last_boxed
from rollout_service.environments.builtin.math.verifier import MathVerifier, require_math_verify
from rollout_service.environments.builtin.math.worker import MathVerdict
from rollout_service.environments.builtin.stem.quantities import LOOKS, SPACES, Quantity, read_quantity
from rollout_service.environments.builtin.stem.units import Unit, read_unit
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, Replayable
from rollout_service.environments.dataset_files import InstanceFields, field_errors, read_instances
from rollout_service.episodes import Episode, EpisodeLimits, Score
from rollout_service.judging.rubric import Rubric, RubricSettings

TASKS: Final = Path(__file__).with_name("tasks.jsonl")
MAX_REFERENCE_CHARS: Final = 65_536
SOLUTIONS: Final = ("extracted_solution", "matched_solution", "solution")
"""Fields of published data sets with a worked solution in place of an answer."""

SPEC = EnvironmentSpec(
    name="stem",
    description=r"Science and engineering questions, answered in \boxed{}; rules first, then a judge.",
    system=(
        "Reason step by step, and put your final answer in \\boxed{}. Give numbers with their unit. "
        "For a multiple-choice question, give the letter of your choice."
    ),
    prompt=(
        "{{ instance.question if 'question' in instance else instance.problem }}"
        "{% if instance.choices is defined and instance.choices %}\n"
        "{% for choice in instance.choices %}\n{{ 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'[loop.index0] }}. {{ choice }}"
        "{% endfor %}{% endif %}"
        "{% if instance.unit is defined and instance.unit %}\n\nGive the number in {{ instance.unit }}.{% endif %}"
    ),
    limits=EpisodeLimits(max_turns=1, max_tokens=8_192, max_turn_tokens=8_192, evaluate_seconds=240.0),
    evaluate_in=EvaluateIn.NONE,
)
RUBRIC = RubricSettings(
    name="stem",
    template=(
        "Decide whether an answer to a question is equivalent to the reference. Notation, rounding to the precision "
        "of the reference, and the order of equal parts do not matter. A missing or wrong unit, sign or condition "
        "does. Do not solve the question yourself: the reference is right.\n\nQuestion:\n"
        "{{ instance.question if 'question' in instance else instance.problem }}\n\n"
        "Reference:\n{{ instance.reference }}\n\nAnswer:\n{{ answer }}"
    ),
)


class StemTask(InstanceFields):
    """The fields that decide the score."""

    question: str = Field(min_length=1)
    answer: Annotated[str, Field(min_length=1, max_length=MAX_REFERENCE_CHARS)]
    kind: Literal["choice", "number", "expression", "text"] | None = None
    choices: tuple[str, ...] = Field((), max_length=len(ascii_uppercase))
    unit: str | None = None
    tolerance: float | None = Field(None, ge=0, le=1)
    judge: bool = True
    """Whether a judge decides cases that rules cannot; otherwise they are wrong."""

    @model_validator(mode="after")
    def _answer_fits_its_kind(self) -> Self:
        if self.choices and self.answer.strip().upper() not in [*ascii_uppercase[: len(self.choices)]]:
            raise ValueError("with `choices`, the `answer` is the letter of one of them")
        if self.kind == "choice" and not self.choices:
            raise ValueError("a task of the kind `choice` needs `choices`")
        if self.unit is not None and self.asked_unit is None:
            raise ValueError(f"the unit {self.unit!r} is not known")
        if self.kind == "number" and self.quantity is None:
            raise ValueError("with the kind `number`, the `answer` is a number, with or without a unit")
        return self

    @property
    def quantity(self) -> Quantity | None:
        """Only if the answer may be a number."""
        return read_quantity(self.answer) if self.kind in (None, "number") and not self.choices else None

    @property
    def asked_unit(self) -> Unit | None:
        return read_unit(self.unit) if self.unit is not None else None

    @property
    def is_expression(self) -> bool:
        """Whether math-verify will probably read the answer."""
        looks_so = any(sign in self.answer for sign in "\\0123456789=^")
        return self.kind == "expression" or (self.kind is None and looks_so and len(self.answer) < 400)


class Stem(AgentEnvironment):
    """Instances: `question` and `answer`; see `StemTask`, and `read_task` for the fields of published data sets."""

    replayable: Replayable = "answer"

    def __init__(
        self,
        spec: EnvironmentSpec = SPEC,
        rubric: RubricSettings = RUBRIC,
        verifier: MathVerifier | None = None,
    ) -> None:
        super().__init__(spec)
        self._rubric = Rubric(rubric)
        self._verifier = verifier or MathVerifier()

    def check(self, instance: dict[str, JsonValue]) -> None:
        task = read_task(instance)
        super().check(instance)
        if task.is_expression and not task.choices:
            require_math_verify()

    async def evaluate(self, episode: Episode) -> Score:
        boxed = last_boxed(episode.answer)
        if not boxed:
            return Score(0.0, {"boxed": 0.0})
        task = read_task(episode.instance)
        verdict = await self._apply_rules(task, boxed)
        if verdict is not RuleVerdict.UNDECIDED:
            return Score(float(verdict is RuleVerdict.RIGHT), {"boxed": 1.0, "by_rule": 1.0})
        if not task.judge:
            return Score(0.0, {"boxed": 1.0, "by_rule": 0.0})
        asked = {**episode.instance, "reference": task.answer}
        judgment = await episode.require_judge().ask(self._rubric, asked, answer=boxed)
        episode.notes.append(judgment.note)
        return Score(judgment.value, {"boxed": 1.0, "by_rule": 0.0})

    async def _apply_rules(self, task: StemTask, boxed: str) -> RuleVerdict:
        if task.choices:
            return compare_choice(task.answer.strip(), boxed, dict(zip(ascii_uppercase, task.choices, strict=False)))
        if same_words(task.answer, boxed):
            return RuleVerdict.RIGHT
        if (gold := task.quantity) is not None:
            verdict = compare_quantity(gold, boxed, task.tolerance, task.asked_unit)
            # math-verify ignores units, so it may not see a wrong one.
            has_unit = not gold.is_bare or (task.unit is not None and read_quantity(boxed) is not None)
            if verdict is not RuleVerdict.UNDECIDED or has_unit:
                return verdict
        if not task.is_expression:
            return RuleVerdict.UNDECIDED
        return await self._compare_expressions(task, boxed)

    async def _compare_expressions(self, task: StemTask, boxed: str) -> RuleVerdict:
        """Trust only equality, since notation of the sciences is easily misread."""
        try:
            verdict = await self._verifier.compare(task.answer, boxed)
        except EnvironmentFailedError:
            if not task.judge:
                raise
            return RuleVerdict.UNDECIDED
        if verdict is MathVerdict.TOO_COSTLY:
            return RuleVerdict.WRONG
        equal = verdict is MathVerdict.EQUAL and not differ_in_case(task.answer, boxed)
        return RuleVerdict.RIGHT if equal else RuleVerdict.UNDECIDED

    def dataset(self) -> list[dict[str, JsonValue]]:
        return [dict(instance) for instance in _shipped()]


@cache
def _shipped() -> list[dict[str, JsonValue]]:
    return read_instances(TASKS)


def read_task(instance: dict[str, JsonValue]) -> StemTask:
    r"""Return the task of an instance, which may be a row of a data set such as SCP-116K.

    Such a row has a `problem` in place of a `question`, and a solution in place of an `answer`: its last `\boxed{}` is
    then the answer, or else all of it the reference for the judge.

    Raises:
        InvalidFieldError: A field is missing or wrong.
    """
    fields = dict(instance)
    if "question" not in fields and "problem" in fields:
        fields["question"] = fields["problem"]
    if "answer" not in fields:
        solution = next((text for name in SOLUTIONS if isinstance(text := fields.get(name), str) and text), None)
        if solution is not None:
            boxed = last_boxed(solution)
            fields |= {"answer": boxed} if boxed else {"answer": solution, "kind": "text"}
    elif isinstance(answer := fields["answer"], int | float) and not isinstance(answer, bool):
        fields["answer"] = str(answer)
    try:
        return StemTask.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise InvalidFieldError([_plainly(one) for one in field_errors(error)]) from error


def _plainly(error: FieldError) -> FieldError:
    missing = error.message == "Field required"
    message = "is missing" if missing else error.message.removeprefix("Value error, ")
    return FieldError(path=error.path, message=message)


environment = Stem()


# A verdict is certain by the rule; what the rules cannot read or compare is undecided.

TOLERANCE: Final = 0.01
"""Relative, unless a task has its own; integers without a unit must be exact."""
_EXACT: Final = 1e-9
_LETTER = re.compile(r"(?:(?:option|choice)\s+)?\(?([a-z])(?:[).:]+\s*|\s+|$)(\S.*)?", re.IGNORECASE | re.DOTALL)
_WRAPPER = re.compile(rf"\\(?:{LOOKS})\s*\{{((?:[^{{}}]|\{{[^{{}}]*\}})*)\}}")
_NESTED: Final = 3
"""Wrappers in each other that are looked through."""
_MATH = re.compile(r"[\d\\{}_^]")
_SIGN = re.compile(r"""(?![\s.,;:?"“”()]|(?<=[^\W\d_])['\u2019](?=[^\W\d_]))\W""")
"""Signs that are neither letters nor the punctuation of words: they carry meaning, as in `x ≤ y`."""
_SYMBOL = re.compile(r"\\[A-Za-z]+|[^\W\d_]")
_GENOTYPE = re.compile(r"(?:(\w)\1)+", re.IGNORECASE)


class RuleVerdict(StrEnum):
    RIGHT = "right"
    WRONG = "wrong"
    UNDECIDED = "undecided"


def compare_choice(gold: str, answer: str, choices: Mapping[str, str]) -> RuleVerdict:
    """Compare an answer that is a letter, a text, or both.

    A letter alone is a choice, even if it is the text of another, because the question asks for letters.
    """
    found = _LETTER.fullmatch(_unwrapped(answer))
    letter, text = (found[1].upper(), found[2]) if found else ("", None)
    if letter in choices and (text is None or same_words(choices[letter].casefold(), text.casefold())):
        letters = {letter}
    else:
        letters = {letter for letter, text in choices.items() if same_words(text, answer)} or {
            letter for letter, text in choices.items() if same_words(text.casefold(), answer.casefold())
        }
    return RuleVerdict.RIGHT if letters == {gold.upper()} else RuleVerdict.WRONG


def compare_quantity(
    gold: Quantity, answer: str, tolerance: float | None = None, unit: Unit | None = None
) -> RuleVerdict:
    """Compare numbers; `unit` is the one in which the question asks for bare numbers."""
    given = read_quantity(answer)
    if given is None:
        return RuleVerdict.UNDECIDED
    if unit is not None:
        gold = gold.in_unit(unit) if gold.is_bare else gold
        given = given.in_unit(unit) if given.is_bare else given
    if tolerance is None:
        tolerance = _EXACT if gold.is_integer and gold.is_bare else TOLERANCE
    equal = gold.equals(given, tolerance)
    if equal is None:
        return RuleVerdict.UNDECIDED
    return RuleVerdict.RIGHT if equal else RuleVerdict.WRONG


def differ_in_case(gold: str, answer: str) -> bool:
    """Look for a letter that only the answer has, and in the other case only the gold; math-verify ignores case."""
    one, other = (set(_SYMBOL.findall(text)) for text in (gold, answer.rpartition("=")[2]))
    return not {symbol.casefold() for symbol in one - other}.isdisjoint(symbol.casefold() for symbol in other - one)


def same_words(one: str, other: str) -> bool:
    """Ignore spaces, the look of letters in LaTeX, and case and punctuation of words; mathematics must be the same."""
    words = _words(one)
    return bool(words) and words == _words(other)


def _words(text: str) -> list[str]:
    text = _unwrapped(text)
    if _MATH.search(text) is not None:
        return text.split()
    if _SIGN.search(text) is None:
        text = re.sub(r"\W+", " ", text)
    return list(map(_without_case, text.split()))


def _unwrapped(text: str) -> str:
    """Return LaTeX without what only changes the look of letters."""
    for _ in range(_NESTED):
        text = _WRAPPER.sub(r"\1", text)
    return SPACES.sub(" ", text).replace("$", "").strip().rstrip(".")


def _without_case(word: str) -> str:
    """Keep the case of what may be a symbol, such as `g`, `CO` or the genotype `AaBb`."""
    if len(word) == 1 or _GENOTYPE.fullmatch(word):
        return word
    return word.casefold() if len(word) > 2 else word[0].casefold() + word[1]
