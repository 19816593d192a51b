"""Prompts: sandboxed Jinja2 templates over a task's instance, and over texts that their user names.

Values are data and never read as a template; a template cannot change the instance or reach Python behind it; a missing
field, or a null one that is written, raises an InvalidFieldError that names it. Booleans, lists and objects are written
as JSON.

Rendering runs on the event loop, so its time and its text are limited. One step of a template may still take any memory
(`"a" * 10**10`), and so `require_plain` leaves to downloaded templates only what cannot.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from time import thread_time
from typing import Any, Final, NoReturn

from jinja2 import StrictUndefined, TemplateError, TemplateRuntimeError, TemplateSyntaxError, nodes, pass_context
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing
from pydantic import JsonValue

from api_schemas.errors import FieldError
from rollout_service.base.errors import ConfigurationError, InvalidFieldError

MAX_CHARS: Final = 4 * 1024**2
"""The longest text that may be rendered, or read by a filter."""
MAX_ITEMS: Final = 100_000
CPU_SECONDS: Final = 0.25
_DEADLINE: Final = "_deadline"

_INVALID: Final = (TemplateError, RecursionError, SyntaxError, MemoryError)
"""Python refuses what is nested too deeply."""

_PLAIN_NODES: Final = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For),
    *(nodes.Name, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.Slice, nodes.List, nodes.Tuple),
    *(nodes.CondExpr, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Test),
    *(nodes.Neg, nodes.Add, nodes.Sub, nodes.Filter, nodes.Keyword),
)
_PLAIN_FILTERS: Final = {
    **dict.fromkeys(("abs", "capitalize", "count", "first", "float", "int", "items", "last", "length", "list"), 0),
    **dict.fromkeys(("lower", "max", "min", "reverse", "string", "tojson", "trim", "unique", "upper"), 0),
    **dict.fromkeys(("indent", "join", "round", "sort"), 8),
    **dict.fromkeys(("d", "default"), MAX_CHARS),
}
"""The filters of downloaded templates, with the largest number and the longest text that they are given."""


class _MissingError(Exception):
    problem = "is missing, and {where} uses it"
    hint = "Add the field to the task's instance, or remove it from the template."

    def __init__(self, owner: object, name: str, message: str = "") -> None:
        super().__init__(message)
        self.owner = owner
        self.name = name


class _NullError(_MissingError):
    problem = "is null, and {where} writes it"
    hint = "Give it a value, or let the template write something else: {{ instance.NAME or '' }}"


class _Null:
    """A null field: false, and equal to none, but an error where it would become text."""

    def __init__(self, owner: object, name: str) -> None:
        self._error = _NullError(owner, name)

    def refuse(self) -> NoReturn:
        raise self._error

    def __str__(self) -> str:
        self.refuse()

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return _is_null(other)

    def __hash__(self) -> int:
        return hash(None)


class _Undefined(StrictUndefined):
    __slots__ = ()

    def __init__(
        self,
        hint: str | None = None,
        obj: Any = missing,
        name: str | None = None,
        exc: Any = None,  # noqa: ARG002 - Jinja's own choice of an exception
    ) -> None:
        super().__init__(hint, obj, name, partial(_MissingError, obj, str(name)))  # type: ignore[arg-type]


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Reads `instance.items` as the field `items`, not dict's method."""

    def __init__(self) -> None:
        # Text for a model is not HTML.
        super().__init__(undefined=_Undefined, autoescape=False, keep_trailing_newline=True, finalize=_write)
        self.tests["none"] = _is_null
        self.filters |= {"_within_limits": _within_limits, "_each_within_limits": _each_within_limits}
        self.policies["json.dumps_function"] = partial(json.dumps, default=_plain)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return self.getitem(obj, attribute)
        if isinstance(obj, _Null):
            obj.refuse()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(obj, _Null):
            obj.refuse()
        value = super().getitem(obj, argument)
        return _Null(obj, str(argument)) if value is None else value

    def limited(self, tree: nodes.Template) -> nodes.Template:
        """Check the limits at each step of a loop and before each filter."""
        for node in list(tree.find_all(nodes.Filter)):
            if node.node is not None:
                node.node = nodes.Filter(node.node, "_within_limits", [], [], None, None, lineno=node.lineno)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_each_within_limits", [], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return tree


@pass_context
def _within_limits(context: Context, value: Any) -> Any:
    _require_time(context[_DEADLINE])
    if isinstance(value, str):
        _require_size(len(value))
    elif isinstance(value, list | tuple | dict) and len(value) > MAX_ITEMS:
        raise TemplateRuntimeError(f"a filter reads a list of more than {MAX_ITEMS:,} items")
    return value


@pass_context
def _each_within_limits(context: Context, values: Any) -> Iterator[Any]:
    for value in values:
        yield _within_limits(context, value)


def _require_time(deadline: float) -> None:
    if thread_time() > deadline:
        raise TemplateRuntimeError(f"it takes more than {CPU_SECONDS:g} s")


def _require_size(size: int) -> None:
    if size > MAX_CHARS:
        raise TemplateRuntimeError(f"a text has more than {MAX_CHARS:,} characters")


def _is_null(value: object) -> bool:
    return value is None or isinstance(value, _Null)


def _write(value: Any) -> Any:
    if value is None:  # such as an element of a list in a loop
        raise _NullError(missing, "")
    if isinstance(value, bool | list | tuple | dict):
        return json.dumps(value, ensure_ascii=False, default=_plain)
    return value


def _plain(value: object) -> str | None:
    """Return the JSON of values that only templates know; an undefined value raises its error."""
    return None if isinstance(value, _Null) else str(value)


class PromptTemplate:
    def __init__(self, source: str, *, where: str, texts: Collection[str] = ()) -> None:
        """The template may use `instance` and the `texts` of these names.

        Raises:
            ConfigurationError: The template is not valid; the message names `where`.
        """
        self._where = where
        environment = _TemplateEnvironment()
        tree = _parse(environment, source, where)
        try:
            unknown = find_undeclared_variables(tree) - {"instance", *texts, *environment.globals}
            self._template = environment.from_string(environment.limited(tree))
        except _INVALID as error:
            raise _invalid_template(where, error) from error
        if unknown:
            names = ", ".join(sorted(unknown))
            known = " and ".join(f"`{name}`" for name in ["instance", *texts])
            raise ConfigurationError(
                f"{where} uses {names}, but a template has only {known}",
                hint="Write {{ instance.NAME }} for a field of the task.",
            )

    def render(self, instance: dict[str, JsonValue], texts: Mapping[str, str] | None = None) -> str:
        """Return the text for an instance; `texts` has a value for each declared name.

        Raises:
            InvalidFieldError: The instance lacks a field that the template uses, or one that it writes is null.
        """
        try:
            return "".join(self._pieces({**(texts or {}), "instance": instance}))
        except _MissingError as error:
            raise self._invalid(error, instance) from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            field = FieldError(path="instance", message=f"{self._where} cannot be rendered with it: {error}")
            raise InvalidFieldError([field]) from error

    def _pieces(self, values: dict[str, Any]) -> Iterator[str]:
        size, deadline = 0, thread_time() + CPU_SECONDS
        for piece in self._template.generate(values, **{_DEADLINE: deadline}):
            _require_time(deadline)
            _require_size(size := size + len(piece))
            yield piece

    def _invalid(self, error: _MissingError, instance: dict[str, JsonValue]) -> InvalidFieldError:
        owners = (path for path, value in _walk(instance, "instance") if value is error.owner)
        path = f"{next(owners, 'instance')}.{error.name}".removesuffix(".")
        field = FieldError(path=path, message=error.problem.format(where=self._where))
        return InvalidFieldError([field], hint=error.hint)


def _parse(environment: _TemplateEnvironment, source: str, where: str) -> nodes.Template:
    try:
        return environment.parse(source)
    except _INVALID as error:
        raise _invalid_template(where, error) from error


def _invalid_template(where: str, error: Exception) -> ConfigurationError:
    line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
    return ConfigurationError(
        f"{where}{line} is not a valid template: {error}",
        hint="Write {{ instance.NAME }} for a field of the task, and close every {{ and {%.",
    )


def require_plain(source: str, *, where: str) -> None:
    """Refuse a template in which one step could take any memory or time.

    What is left reads parts of the instance, which no filter makes more than a few times longer.

    Raises:
        ConfigurationError: The template uses more, or is not valid.
    """
    for node in _parse(_TemplateEnvironment(), source, where).find_all(nodes.Node):
        if (problem := _beyond_plain(node)) is not None:
            raise ConfigurationError(
                f"{where}, line {node.lineno}, uses {problem}, which a template inside an image must not",
                hint="Use fields, `if`, `for` and simple filters, or put the finished text into the instance.",
            )


def _beyond_plain(node: nodes.Node) -> str | None:
    match node:
        case nodes.For(recursive=True):
            return "a recursive loop"
        case nodes.Add() | nodes.Sub():
            is_counter = any(isinstance(side, nodes.Const) for side in (node.left, node.right))
            return None if is_counter else "a sum of two fields"
        case nodes.List() | nodes.Tuple(ctx="load"):
            return None if all(isinstance(item, nodes.Const) for item in node.items) else "a list of fields"
        case nodes.Filter():
            return _beyond_plain_filter(node)
    return None if isinstance(node, _PLAIN_NODES) else f"`{type(node).__name__.lower()}`"


def _beyond_plain_filter(node: nodes.Filter) -> str | None:
    most = _PLAIN_FILTERS.get(node.name)
    if most is None or node.dyn_args is not None or node.dyn_kwargs is not None:
        return f"the filter `{node.name}`"
    for argument in [*node.args, *(keyword.value for keyword in node.kwargs)]:
        value = argument.value if isinstance(argument, nodes.Const) else None
        size = len(value) if isinstance(value, str) else value
        if not isinstance(size, int) or size > most:
            return f"this argument of the filter `{node.name}`"
    return None


def _walk(value: JsonValue, path: str) -> Iterator[tuple[str, JsonValue]]:
    yield path, value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}[{index}]")
