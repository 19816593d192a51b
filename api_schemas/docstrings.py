"""The docstrings below the fields of models, read from the source when someone asks for them.

Pydantic's `use_attribute_docstrings` reads them as each class is defined, which was a third of a service's start.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import cache

from pydantic import BaseModel


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a model's fields, inherited ones included; a field without one is left out."""
    found: dict[str, str | None] = {}
    for cls in reversed(model.__mro__):
        if issubclass(cls, BaseModel) and cls is not BaseModel:
            found |= _of_module(cls.__module__).get(cls.__qualname__, {})
    return {name: text for name in model.model_fields if (text := found.get(name)) is not None}


@cache
def _of_module(name: str) -> dict[str, dict[str, str | None]]:
    """Return the annotated attributes of each class in a module, with their docstrings."""
    try:
        source = inspect.getsource(sys.modules[name])
    except (KeyError, OSError, TypeError):  # there is only compiled code
        return {}
    return dict(_of_classes(ast.parse(source).body, ""))


def _of_classes(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, dict[str, str | None]]]:
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield prefix + statement.name, dict(_attributes(statement.body))
            yield from _of_classes(statement.body, f"{prefix}{statement.name}.")
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of_classes(statement.body, f"{prefix}{statement.name}.<locals>.")


def _attributes(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str | None]]:
    for statement, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.target.id, inspect.cleandoc(text)
                case _:
                    yield statement.target.id, None
