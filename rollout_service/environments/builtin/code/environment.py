"""`code`: write a Python program to `solution.py`; right when it passes all hidden tests in a fresh sandbox.

Guarantees: the tests never enter the agent's sandbox, and of them only the inputs enter the fresh one. A program that
is missing, crashes, or runs out of time or memory fails its tests; a sandbox that fails is an error.
"""

from __future__ import annotations

import ast
import json
import operator
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from math import ceil
from typing import Annotated, Any, Final, Literal

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from api_schemas.errors import FieldError
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.builtin.code.problems import instances
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn
from rollout_service.environments.dataset_files import SPLIT, InstanceFields, field_errors
from rollout_service.episodes import Episode, EpisodeLimits, Score
from sandboxes import ExecResult, Sandbox
from sandboxes.errors import LimitExceededError, SandboxClosedError, SandboxFileError, SandboxStartError

PROGRAM: Final = "solution.py"
MAX_OUTPUT_BYTES: Final = 1024 * 1024
HELD_OUT_SHARE: Final = 4
MEMORY_KILOBYTES: Final = 1024 * 1024
CHECKED_CHARS: Final = 32 * 1024
"""So much of all assertions is parsed before a task is accepted, since that holds up the event loop."""
TESTS_SHARE: Final = 0.8
"""After this share of the evaluation's time, the remaining tests fail."""
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


class _Instance(InstanceFields):
    question: str
    time_limit: float = Field(5.0, gt=0, le=60)
    """CPU seconds of one test."""


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
    `parse_assertion`. `time_limit` is the CPU time of one test.
    """

    def check(self, instance: dict[str, JsonValue]) -> None:
        super().check(instance)
        checked = _read(instance)
        if isinstance(checked, _AssertInstance):
            ends = accumulate(map(len, checked.tests))
            _assertions([test for test, end in zip(checked.tests, ends, strict=True) if end <= CHECKED_CHARS])

    async def evaluate(self, episode: Episode) -> Score:
        sandbox = episode.require_sandbox()
        if not await _is_submitted(sandbox):
            return Score(0.0, {"submitted": 0.0, "tests_passed": 0.0})
        await _refuse_without_python(sandbox)
        passed = await _passed(sandbox, _read(episode.instance), TESTS_SHARE * episode.limits.evaluate_seconds)
        share = sum(passed) / len(passed)
        return Score(float(all(passed)), {"submitted": 1.0, "tests_passed": share})

    def dataset(self) -> list[dict[str, JsonValue]]:
        """Hold every fourth problem out."""
        sides = cycle(["train"] * (HELD_OUT_SHARE - 1) + ["held_out"])
        return [instance | {SPLIT: side} for instance, side in zip(instances(), sides, strict=False)]


def _read(instance: dict[str, JsonValue]) -> _StdioInstance | _AssertInstance:
    try:
        return _INSTANCE.validate_python(instance)
    except ValidationError as error:
        # A path begins with the kind, which the instance's own paths lack.
        raise InvalidFieldError(field_errors(error, skip=1)) from error


def _assertions(tests: Sequence[str]) -> list[Assertion]:
    assertions, fields = [], []
    for index, source in enumerate(tests):
        try:
            assertions.append(parse_assertion(source))
        except BadAssertionError as error:
            fields.append(FieldError(path=f"instance.tests.{index}", message=str(error)))
    if fields:
        raise InvalidFieldError(fields)
    return assertions


async def _is_submitted(sandbox: Sandbox) -> bool:
    """Look for a program before anything of the agent's runs in this sandbox."""
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
    assertions = await anyio.to_thread.run_sync(_assertions, instance.tests)  # parsing 4 MB takes ten seconds
    return [await runner.passes_assertion(assertion) for assertion in assertions]


@dataclass(frozen=True, slots=True)
class _TestRunner:
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
        """Fail the test if the sandbox stops working: that is the program's doing."""
        timeout = min(3 * self.cpu_seconds + 10, self.deadline - anyio.current_time())
        if timeout <= 0:
            return NOT_RUN
        command = _limited(argv, self.cpu_seconds)
        try:
            result = await self.sandbox.exec(command, stdin=stdin, timeout=timeout, output_limit=MAX_OUTPUT_BYTES)
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
    return ["bash", "-c", LIMITED, "bash", str(MEMORY_KILOBYTES), str(ceil(seconds)), *argv]


environment = Code(SPEC)


# The sandbox only returns a value or an output, and the comparison happens on the host. A program never sees the
# expected result, so it cannot forge it by printing, exiting, or redefining `==`. To that end, an assertion is split
# into the expression that the sandbox evaluates and the check of its value.

MAX_VALUE_CHARS: Final = 256 * 1024

HARNESS: Final = """
import json, sys, types

def plain(value):
    if value is None or isinstance(value, (bool, float, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, dict):
        return {"dict": [[plain(key), plain(item)] for key, item in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [plain(item) for item in value]}
    for kind in (int, float):  # numbers of other types, such as a Fraction, that are equal to one of these
        try:
            if kind(value) == value:
                return kind(value)
        except Exception:
            pass
    raise TypeError("a value of type " + type(value).__name__ + " cannot be compared")

asked = json.load(sys.stdin)
with open("solution.py", "rb") as file:  # Python itself reads its encoding
    code = compile(file.read(), "solution.py", "exec")
module = sys.modules["solution"] = types.ModuleType("solution")  # dataclasses look it up
exec(code, vars(module))
value = plain(eval(asked["expression"], vars(module)))
sys.stdout.write("\\n" + asked["marker"] + json.dumps(value) + "\\n")
"""
"""Evaluates an expression in the sandbox with the submission's names, and holds no secret."""


class BadAssertionError(ValueError):
    """The form cannot be checked from outside."""


@dataclass(frozen=True, slots=True)
class Assertion:
    expression: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Question:
    """The harness's input, and the marker of its answer."""

    stdin: bytes
    marker: str

    @classmethod
    def of(cls, expression: str) -> Question:
        marker = f"--value-{secrets.token_hex(16)}--"
        return cls(json.dumps({"expression": expression, "marker": marker}).encode(), marker)

    def value(self, stdout: bytes) -> Any:
        """
        Raises:
            ValueError: The output has no value, or it cannot be read.
        """
        _, found, rest = stdout.decode(errors="replace").rpartition(self.marker)
        line = rest.split("\n", 1)[0]
        if not found or len(line) > MAX_VALUE_CHARS:
            raise ValueError("no value came back")
        try:
            return _value(json.loads(line))
        except (TypeError, KeyError, RecursionError) as error:
            raise ValueError("the answer is not a value") from error


def parse_assertion(source: str) -> Assertion:
    """Split an assertion of one of these forms:

    - `assert EXPRESSION == LITERAL`, also with `!=` and `is`
    - `assert CALL` and `assert not CALL`
    - `assert abs(EXPRESSION - NUMBER) < NUMBER`, also with `<=`

    Raises:
        BadAssertionError: The assertion has another form.
    """
    try:
        body = ast.parse(source.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadAssertionError(f"is not Python: {error}") from error
    if len(body) != 1 or not isinstance(body[0], ast.Assert):
        raise BadAssertionError("must be one assert statement")
    match body[0].test:
        case ast.Compare(left=left, ops=[ast.Eq() | ast.Is()], comparators=[right]):
            return _compared(left, right, operator.eq)
        case ast.Compare(left=left, ops=[ast.NotEq() | ast.IsNot()], comparators=[right]):
            return _compared(left, right, operator.ne)
        case ast.Compare(left=ast.Call(func=ast.Name("abs"), args=[difference]), ops=[op], comparators=[right]):
            return _close(difference, op, right)
        case ast.Call() as call:
            return Assertion(_truth_of(call), bool)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as call):
            return Assertion(_truth_of(call), operator.not_)
    raise BadAssertionError("must be EXPRESSION == LITERAL, CALL, not CALL, or abs(EXPRESSION - NUMBER) < NUMBER")


def _truth_of(call: ast.Call) -> str:
    """Let any value count, such as a match of a regular expression, as it does in Python."""
    return f"not not {ast.unparse(call)}"


def same_output(expected: str, stdout: bytes) -> bool:
    """Ignore trailing spaces and trailing empty lines."""
    return _lines(expected) == _lines(stdout.decode(errors="replace"))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _compared(left: ast.expr, right: ast.expr, holds: Callable[[Any, Any], bool]) -> Assertion:
    expected = _literal(right)
    return Assertion(ast.unparse(left), lambda value: holds(value, expected))


def _close(difference: ast.expr, op: ast.cmpop, right: ast.expr) -> Assertion:
    if not isinstance(difference, ast.BinOp) or not isinstance(difference.op, ast.Sub):
        raise BadAssertionError("abs() must be of a difference, as in abs(f(2) - 1.5) < 0.01")
    compare = {ast.Lt: operator.lt, ast.LtE: operator.le}.get(type(op))
    expected, tolerance = _literal(difference.right), _literal(right)
    if compare is None or not isinstance(expected, int | float) or not isinstance(tolerance, int | float):
        raise BadAssertionError("a difference must be from a number, and `<` or `<=` another number")

    def close(value: Any) -> bool:
        return isinstance(value, int | float) and compare(abs(value - expected), tolerance)

    return Assertion(ast.unparse(difference.left), close)


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BadAssertionError(f"`{ast.unparse(node)[:80]}` is not a literal") from error
    kinds = {type(one.value) for one in ast.walk(node) if isinstance(one, ast.Constant)}
    if strange := kinds & {bytes, complex, type(...)}:  # the harness can send no such value
        name = min(kind.__name__ for kind in strange)
        raise BadAssertionError(f"`{ast.unparse(node)[:80]}` has a value of type {name}, which cannot be compared")
    return value


def _value(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    [(kind, items)] = plain.items()
    if kind == "dict":
        return {_value(key): _value(item) for key, item in items}
    makers: dict[str, Callable[[Any], Any]] = {
        "list": list,
        "tuple": tuple,
        "set": set,
        "frozenset": frozenset,
    }
    return makers[kind](_value(item) for item in items)
