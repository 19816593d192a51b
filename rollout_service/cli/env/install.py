"""Installs the packages of environments that keep theirs apart."""

from __future__ import annotations

from pathlib import Path

from rollout_service.base.errors import did_you_mean
from rollout_service.cli.common import CommandError
from rollout_service.environments.bridges.gem.environment import GEM
from rollout_service.environments.bridges.gymnasium.environment import GYMNASIUM
from rollout_service.environments.bridges.nemo_gym.library import NEMO_GYM
from rollout_service.environments.bridges.reasoning_gym.generate import REASONING_GYM
from rollout_service.environments.bridges.textarena.environment import TEXTARENA
from rollout_service.environments.bridges.verifiers.catalog import VERIFIERS
from rollout_service.environments.bridges.verifiers.declaration import read_declaration
from rollout_service.environments.bridges.verifiers.environment import added_packages
from rollout_service.environments.declarative.declaration import FILE_NAME
from rollout_service.environments.libraries import Library
from rollout_service.environments.swe.grading import SWEBENCH

LIBRARIES: tuple[Library, ...] = (
    *(SWEBENCH, REASONING_GYM, NEMO_GYM, VERIFIERS),
    *(one.library for one in (GEM, GYMNASIUM, TEXTARENA)),
)


def install_library(name: str) -> Path:
    """Install the packages of an environment, and return their folder.

    A folder of verifiers' tasksets gets the library, and the `requirements` of its declaration.

    Raises:
        CommandError: There is no such environment.
        ConfigurationError: The packages cannot be installed.
    """
    if (Path(name).expanduser() / FILE_NAME).is_file():
        return _install_tasksets(Path(name).expanduser().absolute())
    known = {library.name: library for library in LIBRARIES}
    if name not in known:
        raise CommandError(
            f"{name!r} needs no packages of its own{did_you_mean(name, known)}",
            hint=f"Those that do: {', '.join(known)}, and folders of verifiers' tasksets.",
        )
    return known[name].install()


def _install_tasksets(folder: Path) -> Path:
    declaration = read_declaration(folder)
    library = VERIFIERS.install()
    return added_packages(declaration, folder).install() if declaration.requirements else library
