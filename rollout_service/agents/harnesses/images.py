"""The images of harnesses: the base image, with the program from its package registry in the preset's version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollout_service.agents.harnesses.preset import HarnessPreset
from rollout_service.agents.harnesses.registry import get_harness, harnesses
from rollout_service.base.errors import ConfigurationError
from sandboxes.images.sources import Definition, packaged_definition

BASE = "base"


def harness_image(name: str, arguments: Mapping[str, str] | None = None) -> Definition | None:
    """Return the definition of the image that a harness names; None if none does.

    `arguments` override those of the definition.

    Raises:
        ConfigurationError: A preset is not valid.
    """
    found = next((preset for preset in harnesses() if preset.image == name and preset.install), None)
    return None if found is None else _image_of([found], arguments)


def joint_image(names: Sequence[str], arguments: Mapping[str, str] | None = None) -> Definition:
    """Return the definition of one image with the programs of several harnesses.

    Raises:
        ConfigurationError: There is no such harness, or it names nothing to install.
    """
    presets = [get_harness(name) for name in names]
    without = next((preset.name for preset in presets if preset.install is None), None)
    if without is not None:
        raise ConfigurationError(
            f"the harness {without!r} names nothing to install",
            hint="Build its image from a definition of your own, with --definition.",
        )
    return _image_of(presets, arguments)


def _image_of(presets: Sequence[HarnessPreset], arguments: Mapping[str, str] | None) -> Definition:
    return Definition(packaged_definition(BASE), {**_packages(presets), **(arguments or {})})


def _packages(presets: Sequence[HarnessPreset]) -> dict[str, str]:
    """Return the arguments of the base image's definition that make it the image of these harnesses."""
    installs = [preset.install for preset in presets if preset.install is not None]
    packages = {
        "NPM_PACKAGES": [name for install in installs for name in install.npm],
        "NPM_SCRIPTS": [name for install in installs for name in install.scripts],
        "PYTHON_PACKAGES": [name for install in installs for name in install.pip],
        "DEBIAN_PACKAGES": [name for install in installs for name in install.debian],
    }
    return {name: " ".join(dict.fromkeys(values)) for name, values in packages.items() if values}
