"""Prompts: sandboxed Jinja2 templates over a task's instance, and over texts that their user names.

Values are data and never read as a template; a template cannot change the instance or reach Python behind it; a missing
field, or a null one that is written, raises an InvalidFieldError that names it. Booleans, lists and objects are written
as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing
from pydantic import JsonValue

from api_schemas.errors import FieldError
from rollout_service.base.errors import ConfigurationError, InvalidFieldError


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
        try:
            unknown = find_undeclared_variables(environment.parse(source)) - {
                "instance",
                *texts,
                *environment.globals,
            }
            self._template = environment.from_string(source)
        except TemplateError as error:
            line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise ConfigurationError(
                f"{where}{line} is not a valid template: {error}",
                hint="Write {{ instance.NAME }} for a field of the task, and close every {{ and {%.",
            ) from error
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
            return self._template.render({**(texts or {}), "instance": instance})
        except _MissingError as error:
            raise self._invalid(error, instance) from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            field = FieldError(path="instance", message=f"{self._where} cannot be rendered with it: {error}")
            raise InvalidFieldError([field]) from error

    def _invalid(self, error: _MissingError, instance: dict[str, JsonValue]) -> InvalidFieldError:
        owners = (path for path, value in _walk(instance, "instance") if value is error.owner)
        path = f"{next(owners, 'instance')}.{error.name}".removesuffix(".")
        field = FieldError(path=path, message=error.problem.format(where=self._where))
        return InvalidFieldError([field], hint=error.hint)


def _walk(value: JsonValue, path: str) -> Iterator[tuple[str, JsonValue]]:
    yield path, value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}[{index}]")
