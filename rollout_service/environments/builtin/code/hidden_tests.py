"""Hidden tests of programs: the command to run in a sandbox, and the check of its output on the host.

Guarantee: the sandbox only returns a value or an output, and the comparison happens on the host. A program never sees
the expected result, so it cannot forge it by printing, exiting, or redefining `==`. To that end, an assertion is
split into the expression that the sandbox evaluates and the check of its value.
"""

from __future__ import annotations

import ast
import json
import operator
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

MAX_VALUE_CHARS: Final = 256 * 1024

HARNESS: Final = """
import json, sys

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
    raise TypeError("a value of type " + type(value).__name__ + " cannot be compared")

asked = json.load(sys.stdin)
with open("solution.py", encoding="utf-8") as file:
    code = compile(file.read(), "solution.py", "exec")
names = {"__name__": "solution"}
exec(code, names)
value = plain(eval(asked["expression"], names))
sys.stdout.write("\\n" + asked["marker"] + json.dumps(value) + "\\n")
"""
"""The program in the sandbox: it evaluates one expression with the submission's names, and holds no secret."""


class BadAssertionError(ValueError):
    """An assertion in a form that cannot be checked from outside."""


@dataclass(frozen=True, slots=True)
class Assertion:
    """An expression for the sandbox, and the check of its value on the host."""

    expression: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Question:
    """The harness's input, and the marker of its answer in the program's output."""

    stdin: bytes
    marker: str

    @classmethod
    def of(cls, expression: str) -> Question:
        """Ask for the value of an expression."""
        marker = f"--value-{secrets.token_hex(16)}--"
        return cls(json.dumps({"expression": expression, "marker": marker}).encode(), marker)

    def value(self, stdout: bytes) -> Any:
        """Return the value in the output.

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
    - `assert CALL` and `assert not CALL`, for a value that is true or false
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
        case ast.Compare(
            left=ast.Call(func=ast.Name("abs"), args=[difference]), ops=[op], comparators=[right]
        ):
            return _close(difference, op, right)
        case ast.Call() as call:
            return Assertion(ast.unparse(call), bool)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Call() as call):
            return Assertion(ast.unparse(call), operator.not_)
    raise BadAssertionError(
        "must be EXPRESSION == LITERAL, CALL, not CALL, or abs(EXPRESSION - NUMBER) < NUMBER"
    )


def same_output(expected: str, stdout: bytes) -> bool:
    """Return whether outputs are equal except for trailing spaces and trailing empty lines."""
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
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise BadAssertionError(f"`{ast.unparse(node)[:80]}` is not a literal") from error


def _value(plain: Any) -> Any:
    """Restore the value that the harness encoded."""
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
