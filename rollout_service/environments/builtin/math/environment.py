r"""`math`: a question with one exact answer; right when the last `\boxed{...}` is mathematically equal to it.

An answer is wrong if it has no box, doesn't parse, or is too costly to compare (see `worker`). If the gold
answer can't be checked, that is an error.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from fractions import Fraction
from math import comb, gcd, lcm
from typing import Final, TypedDict

from pydantic import JsonValue

from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.builtin.math.verifier import MAX_CHARS, MathVerifier, require_math_verify
from rollout_service.environments.builtin.math.worker import MathVerdict
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, Replayable
from rollout_service.episodes import Episode, EpisodeLimits, Score

SPEC = EnvironmentSpec(
    name="math",
    description=r"Questions with one exact answer in \boxed{}, checked by math-verify.",
    system=r"Reason step by step, and put your final answer in \boxed{}.",
    limits=EpisodeLimits(max_turns=1, max_tokens=8_192, max_turn_tokens=8_192, evaluate_seconds=180.0),
    evaluate_in=EvaluateIn.NONE,
)


class Math(AgentEnvironment):
    """Instances: `question`, and `answer` in LaTeX."""

    replayable: Replayable = "answer"

    def __init__(self, spec: EnvironmentSpec = SPEC, verifier: MathVerifier | None = None) -> None:
        super().__init__(spec)
        self._verifier = verifier or MathVerifier()

    def check(self, instance: dict[str, JsonValue]) -> None:
        super().check(instance)
        _gold(instance)
        require_math_verify()

    async def evaluate(self, episode: Episode) -> Score:
        boxed = last_boxed(episode.answer)
        if boxed is None:
            return Score(0.0, {"boxed": 0.0})
        verdict = await self._verifier.compare(_gold(episode.instance), boxed)
        return Score(
            float(verdict is MathVerdict.EQUAL),
            {
                "boxed": 1.0,
                "readable": float(verdict is not MathVerdict.UNREADABLE),
                "too_costly": float(verdict is MathVerdict.TOO_COSTLY),
            },
        )

    def dataset(self) -> list[dict[str, JsonValue]]:
        return [
            {"question": problem["question"], "answer": problem["answer"], "split": split}
            for split, problems in splits().items()
            for problem in problems
        ]


def _gold(instance: dict[str, JsonValue]) -> str:
    answer = instance.get("answer")
    if isinstance(answer, str) and 0 < len(answer.strip()) <= MAX_CHARS:
        return answer
    message = f"must be LaTeX of 1 to {MAX_CHARS} characters" if "answer" in instance else "is missing"
    raise InvalidFieldError.at("instance.answer", message)


environment = Math()


# Problems of school and early university mathematics. Each answer is computed by exact arithmetic, and copied from
# nowhere.

SEED: Final = 1_905
PER_MAKER: Final = 5


class MathProblem(TypedDict):
    question: str
    answer: str


def sample_problems(seed: int = SEED, per_maker: int = PER_MAKER) -> list[MathProblem]:
    """Return problems without repetition; the same seed gives the same problems."""
    rng = random.Random(seed)  # noqa: S311 - questions, not secrets
    problems: list[MathProblem] = []
    for maker in MAKERS:
        kind: dict[str, MathProblem] = {}
        while len(kind) < per_maker:
            question, answer = maker(rng)
            kind.setdefault(question, MathProblem(question=question, answer=answer))
        problems += kind.values()
    return problems


def splits() -> dict[str, list[MathProblem]]:
    """Put no question in both splits."""
    train = sample_problems()
    seen = {problem["question"] for problem in train}
    held_out = [problem for problem in sample_problems(SEED + 1) if problem["question"] not in seen]
    return {"train": train, "held_out": held_out}


def _latex(value: Fraction | int) -> str:
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _term(coefficient: int, power: str) -> str:
    """Show the sign, as inside a polynomial; `power` may be empty."""
    size = abs(coefficient)
    digits = "" if size == 1 and power else str(size)
    return f" {'-' if coefficient < 0 else '+'} {digits}{power}"


def _nonzero(rng: random.Random, bound: int) -> int:
    return rng.choice([n for n in range(-bound, bound + 1) if n])


def _linear_equation(rng: random.Random) -> tuple[str, str]:
    a, b, c = rng.randint(2, 12), _nonzero(rng, 20), rng.randint(-30, 30)
    return f"Solve ${a}x{_term(b, '')} = {c}$ for $x$.", _latex(Fraction(c - b, a))


def _fraction_sum(rng: random.Random) -> tuple[str, str]:
    a, b, c, d = rng.randint(1, 9), rng.randint(2, 12), rng.randint(1, 9), rng.randint(2, 12)
    question = rf"What is $\frac{{{a}}}{{{b}}} + \frac{{{c}}}{{{d}}}$ in lowest terms?"
    return question, _latex(Fraction(a, b) + Fraction(c, d))


def _quadratic_roots(rng: random.Random) -> tuple[str, str]:
    low, high = sorted(rng.sample([n for n in range(-9, 10) if n], 2))
    if low + high == 0:
        high += 1 if high < 9 else -1
    left = f"x^2{_term(-(low + high), 'x')}{_term(low * high, '')}"
    return f"Give the set of all real solutions of ${left} = 0$.", rf"\{{{low}, {high}\}}"


def _vertex(rng: random.Random) -> tuple[str, str]:
    a, b, c = rng.randint(1, 5), _nonzero(rng, 9), _nonzero(rng, 9)
    question = f"What is the smallest value of ${a}x^2{_term(b, 'x')}{_term(c, '')}$ over the real numbers?"
    return question, _latex(c - Fraction(b * b, 4 * a))


def _derivative(rng: random.Random) -> tuple[str, str]:
    a, b, n, at = rng.randint(2, 6), _nonzero(rng, 9), rng.randint(2, 4), _nonzero(rng, 3)
    question = f"Let $f(x) = {a}x^{n}{_term(b, 'x')}$. What is $f'({at})$?"
    return question, _latex(a * n * at ** (n - 1) + b)


def _integral(rng: random.Random) -> tuple[str, str]:
    a, b, top = rng.randint(1, 7), rng.randint(1, 9), rng.randint(1, 5)
    question = rf"Evaluate $\int_0^{{{top}}} ({a}x^2 + {b}x)\,dx$."
    return question, _latex(Fraction(a * top**3, 3) + Fraction(b * top**2, 2))


def _choose(rng: random.Random) -> tuple[str, str]:
    n, k = rng.randint(6, 14), rng.randint(2, 5)
    return f"In how many ways can {k} people be chosen from a group of {n}?", str(comb(n, k))


def _dice(rng: random.Random) -> tuple[str, str]:
    total = rng.randint(2, 12)
    ways = sum(1 for a in range(1, 7) for b in range(1, 7) if a + b == total)
    return f"Two fair dice are rolled. What is the probability that they sum to {total}?", _latex(Fraction(ways, 36))


def _power_remainder(rng: random.Random) -> tuple[str, str]:
    base, power, modulus = rng.randint(2, 19), rng.randint(20, 90), rng.randint(7, 29)
    return f"What is the remainder of ${base}^{{{power}}}$ divided by {modulus}?", str(pow(base, power, modulus))


def _common(rng: random.Random) -> tuple[str, str]:
    a, b = rng.randint(12, 96), rng.randint(12, 96)
    if rng.random() < 0.5:
        return f"What is the greatest common divisor of {a} and {b}?", str(gcd(a, b))
    return f"What is the least common multiple of {a} and {b}?", str(lcm(a, b))


def _geometric(rng: random.Random) -> tuple[str, str]:
    first, p, q = rng.randint(1, 9), rng.randint(1, 4), rng.randint(5, 9)
    series = rf"infinite geometric series with first term {first} and ratio $\frac{{{p}}}{{{q}}}$"
    return f"What is the sum of the {series}?", _latex(Fraction(first) / (1 - Fraction(p, q)))


def _surd(rng: random.Random) -> tuple[str, str]:
    root, a, b = rng.choice([2, 3, 5, 6, 7]), rng.randint(2, 7), rng.randint(2, 7)
    question = rf"Write $\sqrt{{{a * a * root}}} + \sqrt{{{b * b * root}}}$ as a multiple of one square root."
    return question, rf"{a + b}\sqrt{{{root}}}"


MAKERS: Final[tuple[Callable[[random.Random], tuple[str, str]], ...]] = (
    _linear_equation,
    _fraction_sum,
    _quadratic_roots,
    _vertex,
    _derivative,
    _integral,
    _choose,
    _dice,
    _power_remainder,
    _common,
    _geometric,
    _surd,
)


_TOKEN = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str | None) -> str | None:
    r"""Return the content of the `\boxed{...}` that is closed last, or None.

    Braces inside it are matched, `\{` and `\}` are text, and the time is linear in the length.
    """
    found: str | None = None
    open_braces: list[int | None] = []  # where the content of a box begins, None for any other brace
    for token in _TOKEN.finditer(text or ""):
        match token.group():
            case "{":
                open_braces.append(None)
            case "}":
                begin = open_braces.pop() if open_braces else None
                if begin is not None:
                    found = (text or "")[begin : token.start()].strip()
            case box if box.startswith(r"\boxed"):
                open_braces.append(token.end())
    return found
