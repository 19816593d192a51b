"""`code`: write a Python program to `solution.py`; right when it passes all hidden tests in a fresh sandbox.

Guarantees: the tests are part of the instance and never enter the agent's sandbox; only inputs, never expected outputs,
enter the fresh one. A program that is missing, crashes, or runs out of time or memory fails its tests; a sandbox that
fails is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Annotated, Final, Literal

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from api_schemas.errors import FieldError
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.builtin.code.hidden_tests import (
    HARNESS,
    Assertion,
    BadAssertionError,
    Question,
    parse_assertion,
    same_output,
)
from rollout_service.environments.builtin.code.problems import instances
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn
from rollout_service.environments.splits import SPLIT
from rollout_service.episodes import Episode, EpisodeLimits, Score
from sandboxes import ExecResult, Sandbox
from sandboxes.errors import LimitExceededError, SandboxClosedError, SandboxFileError, SandboxStartError

PROGRAM: Final = "solution.py"
MAX_OUTPUT_BYTES: Final = 1024 * 1024
HELD_OUT_SHARE: Final = 4
MEMORY_KILOBYTES: Final = 1024 * 1024
TESTS_SHARE: Final = 0.8
"""The share of the evaluation's time after which the remaining tests fail."""
NOT_RUN: Final = ExecResult(None, b"", b"", timed_out=False, truncated=False)
LIMITED: Final = 'ulimit -v "$1" && ulimit -t "$2" && shift 2 && exec "$@"'

SPEC = EnvironmentSpec(
    name="code",
    description="Small programs in Python, scored by hidden tests.",
    image="base",
    system="Write a Python 3 program to the file /workspace/solution.py. Try it out with your tools, then call finish.",
    tools=["bash", "write", "edit", "finish"],
    limits=EpisodeLimits(max_turns=24, max_tokens=16_384, evaluate_seconds=300.0),
    evaluate_in=EvaluateIn.FRESH,
    artifacts=[f"/workspace/{PROGRAM}"],
    artifacts_size="256K",
)


class _Instance(BaseModel):
    """The fields of an instance that the tests need; the prompt may use others."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    question: str
    time_limit: float = Field(5.0, gt=0, le=60)
    """The CPU time of one test, in seconds."""


class _Output(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    input: str = Field(max_length=MAX_OUTPUT_BYTES)
    output: str = Field(max_length=MAX_OUTPUT_BYTES // 4)


class _StdioInstance(_Instance):
    kind: Literal["stdio"]
    tests: list[_Output] = Field(min_length=1, max_length=200)


class _AssertInstance(_Instance):
    kind: Literal["assert"]
    tests: list[Annotated[str, Field(max_length=65_536)]] = Field(min_length=1, max_length=200)


_INSTANCE: TypeAdapter[_StdioInstance | _AssertInstance] = TypeAdapter(
    Annotated[_StdioInstance | _AssertInstance, Field(discriminator="kind")]
)


class Code(AgentEnvironment):
    """Instances: `question`, `kind` and `tests`.

    Tests of kind `stdio` are `{"input", "output"}`; those of kind `assert` are assertions in the forms of
    `hidden_tests.parse_assertion`. `time_limit` is the CPU time of one test.
    """

    def check(self, instance: dict[str, JsonValue]) -> None:
        super().check(instance)
        checked = _read(instance)
        if isinstance(checked, _AssertInstance):
            _assertions(checked)

    async def evaluate(self, episode: Episode) -> Score:
        sandbox = episode.require_sandbox()
        if not await _is_submitted(sandbox):
            return Score(0.0, {"submitted": 0.0, "tests_passed": 0.0})
        await _refuse_without_python(sandbox)
        passed = await _passed(
            sandbox, _read(episode.instance), TESTS_SHARE * episode.limits.evaluate_seconds
        )
        share = sum(passed) / len(passed)
        return Score(float(all(passed)), {"submitted": 1.0, "tests_passed": share})

    def dataset(self) -> list[dict[str, JsonValue]]:
        """Return one instance of each problem; every fourth problem is held out."""
        sides = cycle(["train"] * (HELD_OUT_SHARE - 1) + ["held_out"])
        return [instance | {SPLIT: side} for instance, side in zip(instances(), sides, strict=False)]


def _read(instance: dict[str, JsonValue]) -> _StdioInstance | _AssertInstance:
    try:
        return _INSTANCE.validate_python(instance)
    except ValidationError as error:
        fields = [
            # A path begins with the kind, which the instance's own paths lack.
            FieldError(path=".".join(["instance", *map(str, item["loc"][1:])]), message=item["msg"])
            for item in error.errors(include_url=False, include_input=False)
        ]
        raise InvalidFieldError(fields) from error


def _assertions(instance: _AssertInstance) -> list[Assertion]:
    assertions, fields = [], []
    for index, source in enumerate(instance.tests):
        try:
            assertions.append(parse_assertion(source))
        except BadAssertionError as error:
            fields.append(FieldError(path=f"instance.tests.{index}", message=str(error)))
    if fields:
        raise InvalidFieldError(fields)
    return assertions


async def _is_submitted(sandbox: Sandbox) -> bool:
    """Return whether the agent left a readable program, none of which has run in this sandbox yet."""
    try:
        await sandbox.read_file(PROGRAM, limit=MAX_OUTPUT_BYTES)
    except SandboxFileError:
        return False
    return True


async def _refuse_without_python(sandbox: Sandbox) -> None:
    """Raise EnvironmentFailedError without Python: every test would fail, through no fault of the program."""
    result = await sandbox.exec(_limited(["python3", "-c", "print('ready')"], 10.0), timeout=60.0)
    if result.stdout.strip() != b"ready":
        raise EnvironmentFailedError(
            f"the sandbox cannot run python3: {result.stderr.decode(errors='replace').strip()[-500:]}",
            hint="Use an image with python3 and bash.",
        )


async def _passed(sandbox: Sandbox, instance: _StdioInstance | _AssertInstance, seconds: float) -> list[bool]:
    """Return which tests pass. Tests without time left fail, since the program itself used it up."""
    runner = _TestRunner(sandbox, instance.time_limit, anyio.current_time() + seconds)
    if isinstance(instance, _StdioInstance):
        return [await runner.passes_output(test) for test in instance.tests]
    return [await runner.passes_assertion(assertion) for assertion in _assertions(instance)]


@dataclass(frozen=True, slots=True)
class _TestRunner:
    """Runs the tests of one program."""

    sandbox: Sandbox
    cpu_seconds: float
    """The CPU time of one test; the wall-clock limit only ends a program that sleeps."""
    deadline: float
    """The deadline of all tests, on the event loop's clock."""

    async def passes_output(self, test: _Output) -> bool:
        result = await self._run(["python3", PROGRAM], test.input.encode())
        return result.exit_code == 0 and not result.truncated and same_output(test.output, result.stdout)

    async def passes_assertion(self, assertion: Assertion) -> bool:
        question = Question.of(assertion.expression)
        result = await self._run(["python3", "-c", HARNESS], question.stdin)
        # In a thread, since a program can make values that take long to compare.
        return await anyio.to_thread.run_sync(_holds, assertion, question, result.stdout)

    async def _run(self, argv: list[str], stdin: bytes) -> ExecResult:
        """Run one test; a sandbox that stops working during it is the program's doing, and fails the test."""
        timeout = min(3 * self.cpu_seconds + 10, self.deadline - anyio.current_time())
        if timeout <= 0:
            return NOT_RUN
        command = _limited(argv, self.cpu_seconds)
        try:
            result = await self.sandbox.exec(
                command, stdin=stdin, timeout=timeout, output_limit=MAX_OUTPUT_BYTES
            )
            await self.sandbox.end_processes()  # nothing of one test may survive into the next
        except (SandboxStartError, SandboxClosedError, LimitExceededError):
            return NOT_RUN
        return result


def _holds(assertion: Assertion, question: Question, stdout: bytes) -> bool:
    try:
        return assertion.holds(question.value(stdout))
    except (ValueError, TypeError, OverflowError, RecursionError):
        return False


def _limited(argv: list[str], seconds: float) -> list[str]:
    return ["bash", "-c", LIMITED, "bash", str(MEMORY_KILOBYTES), str(max(1, round(seconds))), *argv]


environment = Code(SPEC)
