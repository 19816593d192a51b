"""Filters by name: built-in ones and plug-ins.

Guarantees: a plug-in that cannot be loaded hides no other filter, and requesting it says why. Options are validated,
and errors name their path in the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Self

from pydantic import JsonValue, ValidationError

from api_schemas.errors import FieldError
from api_schemas.runs.auxiliary import RewardPart
from rollout_service.base.errors import ConfigurationError, InvalidFieldError, did_you_mean
from rollout_service.groups.filters import (
    AccuracyBand,
    AllFailed,
    GroupFilter,
    MalformedCalls,
    RewardFilter,
    TooLong,
    Truncated,
    ZeroVariance,
)

GROUP = "rollout_service.filters"
"""The entry point group; each entry point is a subclass of `GroupFilter`."""


class FilterRegistry:
    """Classes of filters by name."""

    def __init__(self) -> None:
        self._kinds: dict[str, type[GroupFilter]] = {
            "zero_variance": ZeroVariance,
            "all_failed": AllFailed,
            "accuracy_band": AccuracyBand,
            "too_long": TooLong,
            "malformed_calls": MalformedCalls,
            "truncated": Truncated,
        }
        self.problems: dict[str, ConfigurationError] = {}
        """The errors of plug-ins that could not be loaded, by name."""

    @classmethod
    def load(cls, *, plugins: Iterable[EntryPoint] | None = None) -> Self:
        """Return a registry of the built-in filters and all plug-ins; it imports them, so call it in a thread."""
        registry = cls()
        for plugin in entry_points(group=GROUP) if plugins is None else plugins:
            try:
                registry.add(plugin.name, _from_plugin(plugin))
            except ConfigurationError as error:
                registry.problems[plugin.name] = error
        return registry

    def add(self, name: str, kind: type[GroupFilter]) -> None:
        """Register a filter.

        Raises:
            ConfigurationError: The name is taken.
        """
        if name in self._kinds:
            raise ConfigurationError(
                f"the filter {name!r} is already registered", hint="Choose another name for the plug-in."
            )
        self._kinds[name] = kind

    @property
    def names(self) -> list[str]:
        """The names of all registered filters."""
        return sorted(self._kinds)

    def make(
        self, name: str, options: Mapping[str, JsonValue] | None = None, *, field: str = "body.filters"
    ) -> GroupFilter:
        """Return a filter with these options.

        Raises:
            InvalidFieldError: There is no such filter, or an option is invalid; the path is `field`.
            ConfigurationError: The plug-in of this name could not be loaded.
        """
        if name in self.problems and name not in self._kinds:
            raise self.problems[name]
        if name not in self._kinds:
            message = f"there is no filter {name!r}{did_you_mean(name, self._kinds)}"
            raise InvalidFieldError(
                [FieldError(path=f"{field}.name", message=message)],
                hint=f"Known filters: {', '.join(self.names)}.",
            )
        try:
            return self._kinds[name].model_validate(dict(options or {}))
        except ValidationError as error:
            fields = [
                FieldError(path=".".join([field, "options", *map(str, one["loc"])]), message=one["msg"])
                for one in error.errors()
            ]
            hint = f"Options of {name!r}: {', '.join(self._kinds[name].model_fields) or 'none'}."
            raise InvalidFieldError(fields, hint=hint) from error


def require_outcome_filters(filters: Sequence[GroupFilter], *, field: str) -> None:
    """Refuse filters that look at rewards for handing on work, for a run that has none.

    Raises:
        InvalidFieldError: A filter looks at such a part; the paths begin with `field`.
    """
    problems = [
        FieldError(
            path=f"{field}.{index}.options.part", message=f"the run has no auxiliary reward, so no {one.part}"
        )
        for index, one in enumerate(filters)
        if isinstance(one, RewardFilter) and one.part in (RewardPart.PARALLEL, RewardPart.FINISH)
    ]
    if problems:
        raise InvalidFieldError(problems, hint="Add `auxiliary` to the run, or leave `part` out.")


def _from_plugin(plugin: EntryPoint) -> type[GroupFilter]:
    where = f"the plug-in {plugin.name!r} ({plugin.value})"
    try:
        kind = plugin.load()
    except Exception as error:
        raise ConfigurationError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, GroupFilter)):
        raise ConfigurationError(
            f"{where} is not a GroupFilter",
            hint="Register a subclass of rollout_service.groups.GroupFilter; its fields are its options.",
        )
    return kind
