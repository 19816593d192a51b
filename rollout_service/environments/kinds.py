"""The kinds of an `environment.toml`: a file with `kind = "swe"` is read by the loader of that kind."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Final

from rollout_service.base.errors import ConfigurationError, did_you_mean
from rollout_service.environments.contract import Environment
from rollout_service.environments.declarative.declaration import FILE_NAME
from rollout_service.environments.declarative.environment import load_folder

_HERE: Final = "rollout_service.environments"
KINDS: Final = {
    "game": f"{_HERE}.bridges.games.declared:load_game",
    "openenv": f"{_HERE}.bridges.openenv.environment:load_openenv",
    "swe": f"{_HERE}.swe.environment:load_swe",
    "verifiers": f"{_HERE}.bridges.verifiers.environment:load_verifiers",
}
"""The loader of each kind, imported with the first folder of it; `load_folder` loads a folder that names none."""


def load_declared(folder: Path) -> Environment:
    """Load a folder with an `environment.toml`.

    Raises:
        ConfigurationError: The file is not valid, or of a kind that is not known.
    """
    kind = _kind(folder)
    if kind is None:
        return load_folder(folder)
    if kind in KINDS:
        load: Callable[[Path], Environment] = resolve_name(KINDS[kind])
        return load(folder)
    raise ConfigurationError(
        f"{folder / FILE_NAME}: there is no kind {kind!r}{did_you_mean(kind, KINDS)}",
        hint=f"Known kinds: {', '.join(sorted(KINDS))}. Leave `kind` out to declare commands of your own.",
    )


def _kind(folder: Path) -> str | None:
    try:
        kind = tomllib.loads((folder / FILE_NAME).read_text(encoding="utf-8")).get("kind")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None  # loading the folder says what is wrong
    return None if kind is None else str(kind)
