"""The known harnesses: the presets of this package, and those of plug-ins.

An entry point of the group `rollout_service.harnesses` is a `pathlib.Path` of a TOML file in the form of
`presets/codex.toml`, or a function that returns one. For an unknown harness or an invalid preset, every function raises
a `ConfigurationError` that names the key at fault.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError

from rollout_service.agents.harnesses.preset import HarnessPreset
from rollout_service.base.errors import ConfigurationError, did_you_mean
from rollout_service.base.validation import describe_problems
from sandboxes.images.sources import Definition, packaged

GROUP = "rollout_service.harnesses"
PRESETS = Path(str(files("rollout_service.agents.harnesses") / "presets"))


def get_harness(name: str) -> HarnessPreset:
    known = _paths()
    if name not in known:
        raise ConfigurationError(
            f"there is no harness {name!r}{did_you_mean(name, known)}",
            hint=f"Known ones: {', '.join(sorted(known))}. `command` runs any program.",
        )
    return read_preset(known[name])


def harnesses() -> list[HarnessPreset]:
    return [read_preset(path) for _, path in sorted(_paths().items())]


@cache
def read_preset(path: Path) -> HarnessPreset:
    try:
        preset = HarnessPreset.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    except ValidationError as error:
        raise ConfigurationError(f"{path}: {'; '.join(describe_problems(error, HarnessPreset))}") from error
    if preset.name != path.stem:
        raise ConfigurationError(f"{path}: its name is {preset.name!r}", hint="Name the file as the harness.")
    return preset


def _paths() -> dict[str, Path]:
    own = {path.stem: path for path in PRESETS.glob("*.toml")}
    for point in entry_points(group=GROUP):
        found = point.load()
        path = found if isinstance(found, Path) else Path(found())
        own.setdefault(path.stem, path)
    return own


BASE = "base"


def harness_image(name: str, arguments: Mapping[str, str] | None = None) -> Definition | None:
    """Return None if no harness names the image.

    `arguments` override those of the definition.
    """
    found = next((preset for preset in harnesses() if preset.image == name and preset.install), None)
    return None if found is None else _image_of([found], arguments)


def joint_image(names: Sequence[str], arguments: Mapping[str, str] | None = None) -> Definition:
    presets = [get_harness(name) for name in names]
    without = next((preset.name for preset in presets if preset.install is None), None)
    if without is not None:
        raise ConfigurationError(
            f"the harness {without!r} names nothing to install",
            hint="Build its image from a definition of your own, with --definition.",
        )
    suites = {preset.install.suite for preset in presets if preset.install and preset.install.suite}
    if len(suites) > 1:
        raise ConfigurationError(
            f"the harnesses need different releases of Debian: {', '.join(sorted(suites))}",
            hint="Build an image for those of each release.",
        )
    return _image_of(presets, arguments)


def _image_of(presets: Sequence[HarnessPreset], arguments: Mapping[str, str] | None) -> Definition:
    return packaged(BASE, {**_packages(presets), **(arguments or {})})


def _packages(presets: Sequence[HarnessPreset]) -> dict[str, str]:
    """Return arguments of the base image's definition that add these harnesses."""
    installs = [preset.install for preset in presets if preset.install is not None]
    packages = {
        "NPM_PACKAGES": [name for install in installs for name in install.npm],
        "NPM_SCRIPTS": [name for install in installs for name in install.scripts],
        "PYTHON_PACKAGES": [name for install in installs for name in install.pip],
        "PYTHON_SOURCES": [name for install in installs for name in install.sources],
        "DEBIAN_PACKAGES": [name for install in installs for name in install.debian],
        "SUITE": [install.suite for install in installs if install.suite is not None],
    }
    return {name: " ".join(dict.fromkeys(values)) for name, values in packages.items() if values}
