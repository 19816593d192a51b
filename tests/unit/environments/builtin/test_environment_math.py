"""`math` distinguishes answers that are right, answers that are wrong, and checks that failed."""

import anyio
import pytest

from api_schemas.rollouts import StopReason
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.builtin.math import worker as math_worker
from rollout_service.environments.builtin.math.environment import Math, environment, sample_problems
from rollout_service.environments.builtin.math.verifier import MathVerifier
from rollout_service.environments.builtin.math.worker import MathVerdict
from rollout_service.pipeline.trial import play
from rollout_service.testing.scripted_policy import ScriptedPolicy

pytestmark = pytest.mark.slow
ENDLESS = "9^{9^{9^{9}}}"


async def test_one_verifier_judges_them_all(tmp_path):
    """Check everything in one test: the workers take seconds to import sympy and end with the event loop."""
    verifier = MathVerifier(processes=1, cpu_seconds=1)
    pwned = tmp_path / "pwned"
    for gold, answer, verdict in [
        (r"\frac12", "0.5", MathVerdict.EQUAL),
        (r"2\sqrt{3}", r"\sqrt{12}", MathVerdict.EQUAL),
        (r"\{1, 2\}", "2, 1", MathVerdict.EQUAL),
        ("3", "x = 3", MathVerdict.EQUAL),
        ("3", r"\frac{6}{2} = 3.0 = 3", MathVerdict.EQUAL),
        ("0.33", "0.333 = 0.33", MathVerdict.EQUAL),
        ("3", "2 = 3", MathVerdict.DIFFERENT),
        ("3", "$2=x=3$", MathVerdict.DIFFERENT),
        ("3", "x = -3 = 3", MathVerdict.DIFFERENT),
        (r"\frac12", "0.4", MathVerdict.DIFFERENT),
        ("0.0000001", "0.0000002", MathVerdict.DIFFERENT),
        ("0.0000001", "x = 0.00000010", MathVerdict.EQUAL),
        ("3", "3$ and $4", MathVerdict.DIFFERENT),
        ("3", f"__import__('os').system('touch {pwned}')", MathVerdict.DIFFERENT),
        ("3", "", MathVerdict.UNREADABLE),
        ("3", "1" * 10_000, MathVerdict.UNREADABLE),
        ("3", ENDLESS, MathVerdict.TOO_COSTLY),
        ("3", "2", MathVerdict.DIFFERENT),
    ]:
        assert await verifier.compare(gold, answer) is verdict, (gold, answer)
    assert not pwned.exists()
    for gold, why in [("", "could not be read"), (ENDLESS, "too much CPU time")]:
        with pytest.raises(EnvironmentFailedError, match=why):
            await verifier.compare(gold, "3")
    for problem in sample_problems(per_maker=1):
        assert await verifier.compare(problem["answer"], problem["answer"]) is MathVerdict.EQUAL, problem
    [worker] = verifier._idle
    worker._process.kill()
    worker._process.wait()
    with pytest.raises(EnvironmentFailedError, match="ended"):  # and no verdict
        await verifier.compare("3", "3")
    assert await verifier.compare("3", "4") is MathVerdict.DIFFERENT


async def test_a_check_can_be_cancelled():
    with anyio.move_on_after(0.5) as scope:
        await MathVerifier(cpu_seconds=20).compare("3", ENDLESS)
    assert scope.cancelled_caught


@pytest.mark.parametrize("error", [MemoryError, RecursionError])
@pytest.mark.parametrize("at_fault", ["gold", "answer"])
def test_memory_that_runs_out_is_a_verdict_only_after_the_gold_answer_was_read(monkeypatch, at_fault, error):
    def parse(text):
        if text == at_fault:
            raise error
        return [text]

    monkeypatch.setattr(math_worker, "_parse", parse)
    monkeypatch.setattr(math_worker, "_equal", lambda expected, given: False)
    said = []
    math_worker.judge(said.append, "gold", "answer")
    if at_fault == "gold":
        assert said == ["it took too much memory"]
    else:
        assert said == [math_worker.GOLD_READ, MathVerdict.TOO_COSTLY]


class FixedVerifier(MathVerifier):
    def __init__(self, verdict):
        super().__init__()
        self.verdict = verdict

    async def compare(self, gold, answer):
        return self.verdict


@pytest.mark.parametrize(
    ("verdict", "reward"),
    [
        (MathVerdict.EQUAL, 1.0),
        (MathVerdict.DIFFERENT, 0.0),
        (MathVerdict.UNREADABLE, 0.0),
        (MathVerdict.TOO_COSTLY, 0.0),
    ],
)
async def test_a_verdict_is_a_score(sandboxes, verdict, reward):
    task = environment.dataset()[0]
    policy = ScriptedPolicy([r"So it is \boxed{1}."])
    trial = await play(Math(verifier=FixedVerifier(verdict)), task, policy, sandboxes)
    assert trial.stop_reason is StopReason.ANSWERED
    assert trial.score.reward == reward
    assert trial.score.parts["too_costly"] == float(verdict is MathVerdict.TOO_COSTLY)
    assert policy.messages[0].role == "system"


async def test_an_answer_without_a_box_is_wrong(sandboxes):
    trial = await play(
        Math(verifier=FixedVerifier(MathVerdict.EQUAL)),
        environment.dataset()[0],
        ScriptedPolicy(["1"]),
        sandboxes,
    )
    assert (trial.score.reward, trial.score.parts) == (0.0, {"boxed": 0.0})


def test_the_problems_are_many_and_always_the_same():
    problems = sample_problems()
    assert len(problems) == len({problem["question"] for problem in problems}) == 60
    assert problems == sample_problems()


@pytest.mark.parametrize(
    "instance", [{"question": "?"}, {"question": "?", "answer": " "}, {"question": "?", "answer": 3}]
)
def test_an_instance_without_a_gold_answer_is_refused(instance):
    with pytest.raises(InvalidFieldError, match=r"instance\.answer"):
        environment.check(instance)
