"""The settings of the providers, the warm pool and admission."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

GIB = 1024**3
FIRST_FREE_USER, LAST_USER, LEAST_USERS = 65_536, 2**32 - 1, 4096
"""The range of user ids that no system gives to its own users, and how many a service leases at a time."""


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class LimitDefaults(_Config):
    """What a sandbox may use where its specification says nothing; sizes in bytes."""

    memory_bytes: PositiveInt = 2 * GIB
    """Memory of all its processes."""
    max_processes: PositiveInt = 512
    """Processes and threads at once."""
    disk_bytes: PositiveInt = 1 * GIB
    """What it may write."""
    cpus: PositiveFloat | None = None
    """CPUs' worth of time; None sets no limit, so that idle CPUs are used."""


class ApptainerConfig(_Config):
    """Sandboxes in Apptainer: own processes, files and network, and no rights on the host."""

    provider: Literal["apptainer"] = "apptainer"
    """Which provider this table is for; this one when left out."""

    binary: Path | None = None
    """The apptainer to use; None looks in ROLLOUT_APPTAINER, PATH and /opt/apptainer/bin."""

    image: str = "base"
    """For a specification without an image."""

    user: str = "nobody"
    """When the service runs as root, the user that images belong to, and that code inside sees itself as; code never
    runs as the host's root."""

    user_range: str = "1879048192-2013265919"
    """When the service runs as root, the numbers of host users that sandboxes run as, each sandbox as one of its own,
    so that none can use up what the kernel counts by user. No user and no range of subordinate ids may have them.
    "none": all run as `user`."""

    fakeroot: bool = False
    """Code runs as a root that has no right on the host, for images that expect it: the user's range of subordinate
    ids (/etc/subuid, /etc/subgid) is mapped. A list of hosts is refused then, and an ordinary user's limit of the disk
    holds for each file alone. The image needs setpriv (util-linux)."""

    unpack: bool = True
    """Keep each image unpacked on disk: starts are faster and no FUSE is needed, for its size on disk."""

    unpacked_dir: Path | None = None
    """Where they are unpacked, on a disk of this machine; None is ~/.cache/rollout-service/unpacked."""

    unpacked_budget_bytes: PositiveInt | None = 50 * GIB
    """The least recently used unpacked images go when all take more; None sets no limit."""

    python: Literal["auto", "image", "toolkit"] = "auto"
    """Whose Python the Python tool runs in: the image's own; one with ipykernel that is bound into any image; or
    the image's if it has one with ipykernel, else the other."""

    toolkit_image: str = "base"
    """The image that the other one is made of."""

    run_dir: Path | None = None
    """Where the folders of live sandboxes are made; a short path. None: below XDG_RUNTIME_DIR or /tmp."""

    private_addresses: bool = False
    """Whether the names of a sandbox's list of hosts may be private addresses (10.0.0.0/8, fd00::/8 and their like)
    that the list does not have itself. Loopback and link-local addresses may be so only where listed."""

    start_timeout: PositiveFloat = 60.0
    """Seconds after which a start has failed."""

    limits: LimitDefaults = LimitDefaults()

    @field_validator("user_range")
    @classmethod
    def _is_range(cls, value: str) -> str:
        parse_user_range(value)
        return value


def parse_user_range(user_range: str) -> range | None:
    """Return the numbers of a range such as "1000000-1999999"; None for "none".

    Raises:
        ValueError: it is not a range, is too small, or has numbers of a system's own users.
    """
    if user_range == "none":
        return None
    first, dash, last = user_range.partition("-")
    if not (dash and first.isdigit() and last.isdigit()):
        raise ValueError('give "FIRST-LAST" or "none"')
    found = range(int(first), int(last) + 1)
    whole = found.stop // LEAST_USERS - -(-found.start // LEAST_USERS)
    if found.start < FIRST_FREE_USER or found.stop > LAST_USER or whole < 1:
        raise ValueError(
            f"give {LEAST_USERS} numbers or more from a multiple of {LEAST_USERS} on, "
            f"between {FIRST_FREE_USER} and {LAST_USER - 1}"
        )
    return found


class DockerConfig(_Config):
    """Sandboxes in Docker, where a daemon answers; see `sandboxes.docker` for what they isolate."""

    provider: Literal["docker"]
    """Which provider this table is for."""

    binary: str = "docker"
    """The client: a name to look for in PATH, or a path."""

    host: str | None = None
    """The daemon, such as "unix:///run/docker.sock"; None is the client's own, by DOCKER_HOST or its context."""

    image: str = "rollout-service/base"
    """For a specification without an image; `scripts/docker-image` makes this one."""

    user: str = "nobody"
    """When the service runs as root, the user that code runs as, in containers too."""

    run_dir: Path | None = None
    """Where the folders of live sandboxes are made; the daemon must be on this host and see it."""

    start_timeout: PositiveFloat = 60.0
    """Seconds after which a start has failed."""

    limits: LimitDefaults = LimitDefaults()


class LocalConfig(_Config):
    """Plain processes of this user: for tests and trusted code. It isolates nothing."""

    provider: Literal["local"]
    """Which provider this table is for."""

    python: Path | None = None
    """The Python of the sessions' kernels; None is the service's own."""

    run_dir: Path | None = None
    """Where the folders of live sandboxes are made. None: below XDG_RUNTIME_DIR or /tmp."""

    start_timeout: PositiveFloat = 30.0
    """Seconds after which a start has failed."""


ProviderConfig = Annotated[ApptainerConfig | DockerConfig | LocalConfig, Field(discriminator="provider")]
"""The settings of a provider: `provider` says which."""


class WarmPoolConfig(_Config):
    """Sandboxes that are started ahead, with their sessions open, for whoever asks next."""

    size: NonNegativeInt = 1
    """How many are kept for each kind of sandbox that is in demand; 0 keeps none."""

    max_kinds: PositiveInt = 4
    """For how many kinds at once; the kind that was wanted least recently gives way."""

    idle_seconds: PositiveFloat = 600.0
    """How long after the last demand a kind is kept."""

    starts: PositiveInt = 2
    """How many are started ahead at the same time."""


class PressureConfig(_Config):
    """Where this host is under so much pressure that no further sandbox is started."""

    enabled: bool = True
    """Whether pressure holds sandboxes back at all."""

    cpu_percent: PositiveFloat = 95.0
    """The share of the last 10 s in which something waited for a processor (PSI "some")."""

    load_per_cpu: PositiveFloat = 8.0
    """The load average per processor; asked only where the kernel has no PSI."""

    memory_percent: PositiveFloat = 10.0
    """The share of the last 10 s in which something waited for memory (PSI "some")."""

    memory_free_bytes: PositiveInt | None = None
    """Memory that is kept free; None is a tenth of it, at most 4 GiB."""

    io_percent: PositiveFloat = 80.0
    """The share of the last 10 s in which everything waited for disks (PSI "full")."""

    disk_free_bytes: PositiveInt = 2 * GIB
    """Kept free where sandboxes and the state are kept."""

    descriptors_free: PositiveInt = 256
    """Open files of the service that are kept free."""

    processes_free: PositiveInt = 1024
    """Processes and threads of the host, or of the service's control group, that are kept free."""


def default_state_dir() -> Path:
    """Where it is noted which run folders were in use: $XDG_STATE_HOME/rollout-service, or below the home folder."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "rollout-service"
