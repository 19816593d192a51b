"""The settings of the providers, the warm pool and admission."""

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

GIB = 1024**3
FIRST_FREE_USER, LAST_USER, LEAST_USERS = 65_536, 2**32 - 1, 4096
"""The range of user ids that no system gives to its own users, and how many a service leases at a time."""


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LimitDefaults(_Config):
    """Limits of a sandbox whose specification does not set them; sizes in bytes."""

    memory_bytes: PositiveInt = 2 * GIB
    """Memory of all its processes together."""
    max_processes: PositiveInt = 512
    """Processes and threads at once."""
    disk_bytes: PositiveInt = 1 * GIB
    """The total size of its writes."""
    cpus: PositiveFloat | None = None
    """CPUs' worth of time; None sets no limit, so that idle CPUs are used."""


class ApptainerConfig(_Config):
    """Sandboxes in Apptainer, with their own processes, files and network, and no rights on the host."""

    provider: Literal["apptainer"] = "apptainer"
    """Which provider this table is for; Apptainer if left out."""

    binary: Path | None = None
    """The Apptainer binary; None looks in ROLLOUT_APPTAINER, PATH and /opt/apptainer/bin."""

    image: str = "base"
    """The image of a specification that names none."""

    user: str = "nobody"
    """When the service runs as root: the user that images belong to, and that code inside sees itself as. Code never
    runs as the host's root."""

    user_range: str = "1879048192-2013265919"
    """When the service runs as root: the range of host user ids for sandboxes. Each sandbox runs as its own user, so
    none can use up resources that the kernel counts by user. No user and no range of subordinate ids may overlap it.
    "none" runs all sandboxes as `user`."""

    fakeroot: bool = False
    """Run code as a root without rights on the host, for images that expect root. The user's range of subordinate ids
    (/etc/subuid, /etc/subgid) is mapped. Allow lists of hosts are then refused, and an ordinary user's disk limit
    applies to each file alone. The image needs setpriv (util-linux)."""

    unpack: bool = True
    """Keep each image unpacked on disk. Starts are faster and need no FUSE, but it takes the image's size on disk."""

    unpacked_dir: Path | None = None
    """Where images are unpacked, on a local disk; None is ~/.cache/rollout-service/unpacked."""

    unpacked_budget_bytes: PositiveInt | None = 50 * GIB
    """Size of all unpacked images above which the least recently used are removed; None sets no limit."""

    reuse_setups: bool = True
    """Make each sandbox as Apptainer made the first one of its kind (image, limits, binds, network), without running
    Apptainer again, on hosts that allow it. A start then takes a third of the time."""

    python: Literal["auto", "image", "toolkit"] = "auto"
    """The Python that the Python tool runs in: "image" is the image's own, "toolkit" is one with ipykernel that is
    bound into any image, and "auto" is the image's if it has ipykernel, else the toolkit's."""

    toolkit_image: str = "base"
    """The image that the toolkit is made from."""

    run_dir: Path | None = None
    """Where the folders of live sandboxes are created; a short path. None is below XDG_RUNTIME_DIR or /tmp."""

    private_addresses: bool = False
    """Whether listed names may resolve to private addresses (10.0.0.0/8, fd00::/8 and the like) that are not listed
    themselves. Loopback and link-local addresses must always be listed."""

    start_timeout: PositiveFloat = 60.0
    """Seconds after which a start fails."""

    limits: LimitDefaults = LimitDefaults()

    @field_validator("user_range")
    @classmethod
    def _is_range(cls, value: str) -> str:
        parse_user_range(value)
        return value


def parse_user_range(user_range: str) -> range | None:
    """Return the ids of a range such as "1000000-1999999", or None for "none".

    Raises:
        ValueError: The text is not a range, or the range is too small or contains ids of a system's own users.
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
            f"give at least {LEAST_USERS} ids, starting at a multiple of {LEAST_USERS}, "
            f"between {FIRST_FREE_USER} and {LAST_USER - 1}"
        )
    return found


class DockerConfig(_Config):
    """Sandboxes in Docker, for hosts with a running daemon; `sandboxes.providers.docker` describes their isolation."""

    provider: Literal["docker"]
    """Which provider this table is for."""

    binary: str = "docker"
    """The client program: a name on PATH, or a path."""

    host: str | None = None
    """The daemon, such as "unix:///run/docker.sock"; None is the client's default (DOCKER_HOST or its context)."""

    image: str = "rollout-service/base"
    """The image of a specification that names none; `scripts/docker-image` builds this one."""

    user: str = "nobody"
    """When the service runs as root: the user that code runs as, inside containers too."""

    run_dir: Path | None = None
    """Where the folders of live sandboxes are created; the daemon must be on this host and see it."""

    start_timeout: PositiveFloat = 60.0
    """Seconds after which a start fails."""

    limits: LimitDefaults = LimitDefaults()


class E2BConfig(_Config):
    """Sandboxes of a server that speaks E2B's API; `sandboxes.providers.e2b.provider` says what it promises."""

    provider: Literal["e2b"]
    """Which provider this table is for."""

    domain: str | None = None
    """The server's domain; None is E2B_DOMAIN, or E2B's cloud."""

    api_url: str | None = None
    """The address of the API, if it is not `https://api.DOMAIN`; None is E2B_API_URL."""

    sandbox_url: str | None = None
    """The address of all sandboxes, if each does not have one below the domain; None is E2B_SANDBOX_URL."""

    api_key_env: str = "E2B_API_KEY"
    """The environment variable with the API key."""

    api_key_file: Path | None = None
    """A file with the API key, instead of the variable."""

    template: str = "base"
    """The template of a specification that names no image. It needs bash, coreutils, tar, setpriv and python3."""

    user: str = "user"
    """The user of the template that code runs as. "root" keeps all rights inside, also that of ending the sandbox."""

    python: str = "python3"
    """The template's Python for the Python tool; it needs ipykernel."""

    ttl_seconds: Annotated[int, Field(ge=30)] = 300
    """Seconds after which the server ends a sandbox that is not renewed, for example after this host lost power."""

    run_dir: Path | None = None
    """Where the folders of live sandboxes are created; None is below XDG_RUNTIME_DIR or /tmp."""

    start_timeout: PositiveFloat = 60.0
    """Seconds after which a start fails, waits for a server that is busy included."""


class LocalConfig(_Config):
    """Plain processes of this user, for tests and trusted code. It isolates nothing."""

    provider: Literal["local"]
    """Which provider this table is for."""

    python: Path | None = None
    """The Python that runs the sessions' kernels; None is the service's own."""

    run_dir: Path | None = None
    """Where the folders of live sandboxes are created; None is below XDG_RUNTIME_DIR or /tmp."""

    start_timeout: PositiveFloat = 30.0
    """Seconds after which a start fails."""


ProviderConfig = Annotated[ApptainerConfig | DockerConfig | E2BConfig | LocalConfig, Field(discriminator="provider")]
"""The settings of one provider; `provider` selects it."""


class WarmPoolConfig(_Config):
    """Sandboxes that are started ahead of demand, with their sessions open."""

    size: NonNegativeInt = 1
    """Number kept for each kind of sandbox in demand; 0 keeps none."""

    max_kinds: PositiveInt = 4
    """Number of kinds kept at once; the least recently requested kind is dropped first."""

    idle_seconds: PositiveFloat = 600.0
    """Seconds a kind is kept after its last request."""

    starts: PositiveInt = 2
    """Number started ahead at the same time."""


class PressureConfig(_Config):
    """Thresholds of host pressure at which no further sandbox is started."""

    enabled: bool = True
    """Whether pressure throttles sandbox starts at all."""

    cpu_percent: PositiveFloat = 95.0
    """Share of the last 10 s in which something waited for a processor (PSI "some")."""

    load_per_cpu: PositiveFloat = 8.0
    """Load average per processor; used only if the kernel has no PSI."""

    memory_percent: PositiveFloat = 10.0
    """Share of the last 10 s in which something waited for memory (PSI "some")."""

    memory_free_bytes: PositiveInt | None = None
    """Memory kept free; None is a tenth of the host's, at most 4 GiB."""

    io_percent: PositiveFloat = 80.0
    """Share of the last 10 s in which everything waited for disks (PSI "full")."""

    disk_free_bytes: PositiveInt = 2 * GIB
    """Disk space kept free where sandboxes and the state are stored."""

    descriptors_free: PositiveInt = 256
    """Number of the service's file descriptors kept free."""

    processes_free: PositiveInt = 1024
    """Processes and threads of the host, or of the service's control group, kept free."""


def default_state_dir() -> Path:
    """Return the default state folder: $XDG_STATE_HOME/rollout-service, or ~/.local/state/rollout-service."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "rollout-service"


def default_cache() -> Path:
    """Return `$XDG_CACHE_HOME/rollout-service`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-service"
