"""Functions by name, as the settings of live sessions have them: built-in ones and plug-ins.

Guarantee: a name that stands for nothing is refused when the service starts, with the nearest one that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from rollout_service.base.errors import ConfigurationError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


def load_functions(
    names: Iterable[str],
    built_in: Mapping[str, F],
    *,
    group: str,
    setting: str,
    plugins: Iterable[EntryPoint] | None = None,
) -> dict[str, F]:
    """Return the functions of these names, in their order; it imports plug-ins, so call it in a thread.

    Plug-ins are the entry points of the `group`; `setting` is where the names stand.

    Raises:
        ConfigurationError: A name is unknown, or its plug-in is not a function or cannot be loaded.
    """
    found = {plugin.name: plugin for plugin in (entry_points(group=group) if plugins is None else plugins)}
    functions: dict[str, F] = {}
    for name in names:
        if name not in built_in and name not in found:
            known = sorted({*built_in, *found})
            raise ConfigurationError(
                f"{setting}: there is no {name!r}{did_you_mean(name, known)}",
                hint=f"Known names: {', '.join(known)}.",
            )
        functions[name] = built_in[name] if name in built_in else _from_plugin(found[name], setting)
    return functions


def _from_plugin(plugin: EntryPoint, setting: str) -> Any:
    where = f"{setting}: the plug-in {plugin.name!r} ({plugin.value})"
    try:
        function = plugin.load()
    except Exception as error:
        raise ConfigurationError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ConfigurationError(
            f"{where} is not a function", hint="Name a function in the plug-in's entry point."
        )
    return function
