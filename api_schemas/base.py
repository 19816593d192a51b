"""The base of every wire model. Unknown fields are refused, values are immutable, and numbers are bounded."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cache
from threading import RLock
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
    StringConstraints,
)
from pydantic.json_schema import JsonSchemaValue

if sys.version_info >= (3, 11):
    from enum import StrEnum as StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """The standard library's `StrEnum`, which Python 3.10 lacks."""

        __str__ = str.__str__


MAX_INT = 2**62
"""The largest integer on the wire: it fits 64 bits with room for sums, and is exact where JSON numbers are floats."""
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = 3.4e38
"""The largest number that arrays of 32 bits hold, as those of a batch. Statistics can square it."""
MAX_SECONDS = 1e9


_building = RLock()


def _no_text_or_switch(value: object) -> object:
    if isinstance(value, bool | str):
        raise ValueError("must be a number")  # noqa: TRY004 - pydantic makes a field's error of it
    return value


def _no_number_or_day(value: object) -> object:
    if isinstance(value, datetime) or (isinstance(value, str) and "T" in value.upper()):
        return value
    raise ValueError("must be a date and time, such as 2026-01-31T12:00:00Z")


def _without_surrogates(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


Text = Annotated[str, AfterValidator(_without_surrogates)]
"""A text from somebody's code, with U+FFFD for each half of a surrogate pair. Python's texts may have some, as in names
of files; since UTF-8 cannot encode them, one would make its whole rollout unreadable."""

Number = BeforeValidator(_no_text_or_switch)
"""A validator that refuses `true` and `"1"`, which pydantic would accept as numbers."""

Flag = Annotated[bool, Strict()]
"""`true` or `false`, but not `1`, `"yes"` or `"off"`."""

Integer = Annotated[int, Strict()]
"""Any integer, but not `true`, `"1"` or `1.0`."""

Real = Annotated[float, Strict()]
"""Any number, but not `true` or `"1"`."""

Count = Annotated[int, Number, Field(ge=1, le=MAX_INT)]
"""A number of things, at least one."""

CountOrZero = Annotated[int, Number, Field(ge=0, le=MAX_INT)]
"""A number of things that may be 0, a size, an offset or a version."""

Signed = Annotated[int, Number, Field(ge=-MAX_INT, le=MAX_INT)]
"""A seed or a priority."""

Seconds = Annotated[float, Number, Field(gt=0, le=MAX_SECONDS)]
"""A positive duration of up to thirty years; longer ones overflow timers and dates."""

SecondsOrZero = Annotated[float, Number, Field(ge=0, le=MAX_SECONDS)]
"""A duration of up to thirty years that may be 0."""

Timestamp = Annotated[AwareDatetime, BeforeValidator(_no_number_or_day)]
"""A date and time with its offset, as in RFC 3339. Pydantic alone would also accept `0` and `"2026-01-31"`."""

RolloutId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
"""An identifier that a caller may choose: 1-128 letters, digits, `.`, `_`, `:` or `-`."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The name of an environment, a pool or an image: 1-64 letters, digits, `.`, `_` or `-`."""


def tagged(by: str) -> Callable[[dict[str, Any]], None]:
    """Return a `json_schema_extra` for a member of a union, whose tag has a default in Python but not on the wire."""

    def require(schema: dict[str, Any]) -> None:
        schema["required"] = sorted({by, *schema.get("required", ())})

    return require


class WireModel(BaseModel):
    """A frozen model that refuses unknown fields and non-finite numbers, and a list or mapping at its first bad item.

    Its validator is built when it is first used, in whatever thread, because a program seldom uses more than a few.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def model_rebuild(cls, **options: Any) -> bool | None:
        """Build the validator, one at a time: before pydantic 2.14, two threads could disturb each other."""
        with _building:
            return super().model_rebuild(**options)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe each property by its field's docstring."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        texts = field_docstrings(cls)
        for name, field in cls.model_fields.items():
            key = field.alias or name
            if key in properties and name in texts and field.description is None:
                properties[key]["description"] = texts[name]
        return schema


def _fail_fast(schema: Any) -> None:
    """Let the lists and mappings in a schema report one error: of millions, each takes a hundred times its item."""
    if isinstance(schema, list | tuple):
        for inner in schema:
            _fail_fast(inner)
    elif isinstance(schema, dict):
        if schema.get("type") in ("list", "set", "tuple", "dict"):
            schema["fail_fast"] = True
        for key, inner in schema.items():
            if key not in ("default", "metadata", "serialization"):
                _fail_fast(inner)


# Pydantic's `use_attribute_docstrings` reads the source of each class as it is defined, by looking through all loaded
# modules, which was a third of a service's start. Here it is read when someone asks for the docstrings.


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


# The trace that a request is part of, in the format of W3C Trace Context, so that other tools can follow it.


class TraceContext(WireModel):
    """The caller's span. Under the same id, a request with another one is still the same request."""

    traceparent: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")]
    """The version, the trace's id, the span's id and the flags, as in the header of that name."""
    tracestate: Annotated[str, StringConstraints(max_length=512)] = ""
    """Data of tracing tools, as in the header of that name."""
    link: Flag = False
    """Whether the rollout has a trace of its own that links to this span, instead of continuing its trace."""
