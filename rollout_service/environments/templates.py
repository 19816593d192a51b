"""Prompts: sandboxed Jinja2 over a task's instance.

Guarantees: the instance is data and is never read as a template, whatever braces it holds; a template cannot
change the instance or reach Python behind it; a field that is missing is an InvalidFieldError that names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing
from pydantic import JsonValue

from api_schemas.errors import FieldError
from rollout_service.errors import ConfigurationError, InvalidFieldError


class _MissingError(Exception):
    """A template used a field that is not there."""

    def __init__(self, owner: object, name: str, message: str) -> None:
        super().__init__(message)
        self.owner = owner
        self.name = name


class _Undefined(StrictUndefined):
    """An undefined value that, when it is used, says whose field it was."""

    __slots__ = ()

    def __init__(
        self,
        hint: str | None = None,
        obj: Any = missing,
        name: str | None = None,
        exc: Any = None,  # noqa: ARG002 - jinja's own choice of an exception
    ) -> None:
        super().__init__(hint, obj, name, partial(_MissingError, obj, str(name)))  # type: ignore[arg-type]


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Where `instance.items` means the field `items`, not a method of dict."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


class PromptTemplate:
    """One template, compiled."""

    def __init__(self, source: str, *, where: str) -> None:
        """Compile it; raises ConfigurationError, naming `where`, when it is not valid."""
        self._where = where
        # Text for a model is not HTML: nothing is to be escaped.
        environment = _TemplateEnvironment(undefined=_Undefined, autoescape=False, keep_trailing_newline=True)
        try:
            unknown = find_undeclared_variables(environment.parse(source)) - {
                "instance",
                *environment.globals,
            }
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigurationError(f"{where} is not a valid template: {error}") from error
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ConfigurationError(
                f"{where} uses {names}, and a template knows nothing but `instance`",
                hint="Write {{ instance.NAME }} for a field of the task.",
            )

    def render(self, instance: dict[str, JsonValue]) -> str:
        """The text for an instance; raises InvalidFieldError with the path of what it lacks."""
        try:
            return self._template.render(instance=instance)
        except _MissingError as error:
            raise self._invalid(error, instance) from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            field = FieldError(path="instance", message=f"{self._where} cannot be rendered with it: {error}")
            raise InvalidFieldError([field]) from error

    def _invalid(self, error: _MissingError, instance: dict[str, JsonValue]) -> InvalidFieldError:
        owners = (path for path, value in _walk(instance, "instance") if value is error.owner)
        path = f"{next(owners, 'instance')}.{error.name}"
        return InvalidFieldError(
            [FieldError(path=path, message=f"is missing, and {self._where} uses it")],
            hint="Add the field to the task's instance, or make the template do without it.",
        )


def _walk(value: JsonValue, path: str) -> Iterator[tuple[str, JsonValue]]:
    yield path, value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}[{index}]")
