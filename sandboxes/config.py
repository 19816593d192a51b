"""The settings of the providers, and the one factory that turns settings into a provider."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from sandboxes.contract import SandboxProvider

GIB = 1024**3


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LimitDefaults(_Config):
    """What a sandbox may use where its specification says nothing; sizes in bytes."""

    memory_bytes: PositiveInt = 2 * GIB
    max_processes: PositiveInt = 512
    disk_bytes: PositiveInt = 1 * GIB
    cpus: PositiveFloat | None = None
    """CPUs' worth of time; None sets no limit, so that idle CPUs are used."""


class ApptainerConfig(_Config):
    """Sandboxes in Apptainer: own processes, files and network, and no rights on the host."""

    provider: Literal["apptainer"] = "apptainer"
    binary: Path | None = None
    """The apptainer to use; None looks in ROLLOUT_APPTAINER, PATH and /opt/apptainer/bin."""

    image: str = "base"
    """For a specification without an image."""

    user: str = "nobody"
    """When the service runs as root, the user that sandboxes run as; code never runs as the host's root."""

    unpack: bool = True
    """Keep each image unpacked on disk: starts are faster and no FUSE is needed, for its size on disk."""

    run_dir: Path | None = None
    """Where the folders of live sandboxes are made; a short path. None: below XDG_RUNTIME_DIR or /tmp."""

    start_timeout: PositiveFloat = 60.0
    limits: LimitDefaults = LimitDefaults()


class LocalConfig(_Config):
    """Plain processes of this user: for tests and trusted code. It isolates nothing."""

    provider: Literal["local"]
    python: Path | None = None
    """The Python of the sessions' kernels; None is the service's own."""

    run_dir: Path | None = None
    start_timeout: PositiveFloat = 30.0


ProviderConfig = Annotated[ApptainerConfig | LocalConfig, Field(discriminator="provider")]
"""The settings of a provider: `provider` says which."""


def default_state_dir() -> Path:
    """Where records of live sandboxes are kept: $XDG_STATE_HOME/rollout-service, or below the home folder."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "rollout-service"


def make_provider(config: ProviderConfig, state_dir: Path | None = None) -> SandboxProvider:
    """The provider that the settings describe. Nothing is started; `state_dir` is made when it is first used.

    Raises:
        ProviderUnavailableError: this host lacks what the provider needs; the hint says how to install it.
        SandboxConfigError: the settings contradict this host, for example a user that does not exist.
    """
    state = state_dir or default_state_dir()
    if isinstance(config, LocalConfig):
        from sandboxes.local import LocalProvider

        return LocalProvider(config, state)
    from sandboxes.apptainer import ApptainerProvider

    return ApptainerProvider(config, state)
