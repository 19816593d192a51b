"""Prompts: sandboxed Jinja2 templates over a task's instance, and over texts that their user names.

Guarantees: the values are data and never read as a template, whatever braces they contain; a template cannot change the
instance or reach Python behind it; a missing field raises an InvalidFieldError that names it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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
    """A template used a field that the instance lacks."""

    def __init__(self, owner: object, name: str, message: str) -> None:
        super().__init__(message)
        self.owner = owner
        self.name = name


class _Undefined(StrictUndefined):
    """An undefined value that names its owner when it is used."""

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
    """A Jinja environment where `instance.items` means the field `items`, not dict's method."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


class PromptTemplate:
    """A compiled template."""

    def __init__(self, source: str, *, where: str, texts: Collection[str] = ()) -> None:
        """Compile the template, which may use `instance` and the `texts` of these names.

        Raises:
            ConfigurationError: The template is not valid; the message names `where`.
        """
        self._where = where
        # Text for a model is not HTML, so nothing is escaped.
        environment = _TemplateEnvironment(undefined=_Undefined, autoescape=False, keep_trailing_newline=True)
        try:
            unknown = find_undeclared_variables(environment.parse(source)) - {
                "instance",
                *texts,
                *environment.globals,
            }
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigurationError(f"{where} is not a valid template: {error}") from error
        if unknown:
            names = ", ".join(sorted(unknown))
            known = " and ".join(f"`{name}`" for name in ["instance", *texts])
            raise ConfigurationError(
                f"{where} uses {names}, but a template has only {known}",
                hint="Write {{ instance.NAME }} for a field of the task.",
            )

    def render(self, instance: dict[str, JsonValue], texts: Mapping[str, str] | None = None) -> str:
        """Return the text for an instance; `texts` has a value for each name that was declared.

        Raises:
            InvalidFieldError: The instance lacks a field that the template uses.
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
        path = f"{next(owners, 'instance')}.{error.name}"
        return InvalidFieldError(
            [FieldError(path=path, message=f"is missing, and {self._where} uses it")],
            hint="Add the field to the task's instance, or remove it from the template.",
        )


def _walk(value: JsonValue, path: str) -> Iterator[tuple[str, JsonValue]]:
    yield path, value
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _walk(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, f"{path}[{index}]")
