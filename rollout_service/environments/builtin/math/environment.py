r"""`math`: a question with one exact answer; right when the last `\boxed{...}` is mathematically equal to it.

An answer is wrong if it has no box, doesn't parse, or is too costly to compare (see `worker`). If the gold
answer can't be checked, that is an error.
"""

from __future__ import annotations

from pydantic import JsonValue

from api_schemas.errors import FieldError
from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.builtin.boxed import last_boxed
from rollout_service.environments.builtin.math.problems import splits
from rollout_service.environments.builtin.math.verifier import MAX_CHARS, MathVerifier
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
    raise InvalidFieldError([FieldError(path="instance.answer", message=message)])


environment = Math()
