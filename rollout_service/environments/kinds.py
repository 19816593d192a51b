"""The kinds of an `environment.toml`: a file with `kind = "swe"` is read by the loader of that kind."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rollout_service.environments.bridges.games.declared import load_game
from rollout_service.environments.bridges.openenv.environment import load_openenv
from rollout_service.environments.bridges.verifiers.environment import load_verifiers
from rollout_service.environments.contract import Environment
from rollout_service.environments.declarative.declaration import FILE_NAME
from rollout_service.environments.declarative.environment import load_folder
from rollout_service.environments.swe.environment import load_swe
from rollout_service.errors import ConfigurationError, did_you_mean

KINDS: Final[dict[str, Callable[[Path], Environment]]] = {
    "game": load_game,
    "openenv": load_openenv,
    "swe": load_swe,
    "verifiers": load_verifiers,
}
"""What loads the folder of each kind; a folder that names none is loaded by `load_folder`."""


def load_declared(folder: Path) -> Environment:
    """Load a folder with an `environment.toml`.

    Raises:
        ConfigurationError: The file is not valid, or of a kind that is not known.
    """
    kind = _kind(folder)
    if kind is None:
        return load_folder(folder)
    if kind in KINDS:
        return KINDS[kind](folder)
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
