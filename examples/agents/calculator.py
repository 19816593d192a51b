"""A tool for the example agents: arithmetic, evaluated without running anything."""

from __future__ import annotations

import ast
import operator

DESCRIPTION = "Evaluate an arithmetic expression over integers, such as 6 * (7 + 1)."
PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
PROMPT = r"Use the tool `calculate`, then give the final integer in \boxed{}."
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST = 10**12


def calculate(expression: str) -> str:
    """Return the value of an expression, or why it has none."""
    try:
        return str(_value(ast.parse(expression[:1_000], mode="eval").body))
    except (ArithmeticError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"error: {error}"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value: int = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        if abs(value) > _LARGEST:
            raise ValueError("the value is too large")
        return value
    raise ValueError("only integers and + - * // % are allowed")
