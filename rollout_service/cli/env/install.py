"""Installs the packages of environments that keep theirs apart."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Final

from rollout_service.base.errors import ConfigurationError, did_you_mean
from rollout_service.cli.common import CommandError
from rollout_service.environments.bridges.verifiers.catalog import VERIFIERS
from rollout_service.environments.bridges.verifiers.declaration import read_declaration
from rollout_service.environments.bridges.verifiers.environment import added_packages
from rollout_service.environments.declarative.declaration import FILE_NAME
from rollout_service.environments.libraries import Library

GROUP: Final = "rollout_service.libraries"
"""Each entry point is a `Library` of its own name."""


def install_library(name: str) -> Path:
    """Install the packages of an environment, and return their folder.

    A folder of verifiers' tasksets gets the library, and the `requirements` of its declaration.
    """
    if (Path(name).expanduser() / FILE_NAME).is_file():
        return _install_tasksets(Path(name).expanduser().absolute())
    return find_library(name).install()


def find_library(name: str, *, plugins: Iterable[EntryPoint] | None = None) -> Library:
    known = {plugin.name: plugin for plugin in (entry_points(group=GROUP) if plugins is None else plugins)}
    if name not in known:
        raise CommandError(
            f"{name!r} needs no packages of its own{did_you_mean(name, known)}",
            hint=f"Those that do: {', '.join(sorted(known))}, and folders of verifiers' tasksets.",
        )
    where = f"the plug-in {name!r} ({known[name].value})"
    try:
        library = known[name].load()
    except Exception as error:
        raise ConfigurationError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(library, Library):
        raise ConfigurationError(f"{where} is not a Library", hint="Name a Library in the entry point.")
    return library


def missing_bridges() -> list[Library]:
    bridges = [plugin.name for plugin in entry_points(group=GROUP) if ".bridges." in plugin.value]
    return [one for one in map(find_library, bridges) if not one.is_installed]


def _install_tasksets(folder: Path) -> Path:
    declaration = read_declaration(folder)
    library = VERIFIERS.install()
    return added_packages(declaration, folder).install() if declaration.requirements else library
