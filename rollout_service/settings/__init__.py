"""The service's settings: flags over `ROLLOUT_*` environment variables over `rollout.toml` over defaults.

Guarantees: every key is known (an unknown one is refused, with the closest known key), and a service that listens
beyond loopback without a key does not start. Nested keys are tables in TOML and `__` in variables:
`[pipeline] rollout_workers = 64` is `ROLLOUT_PIPELINE__ROLLOUT_WORKERS=64`.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from api_schemas.base import Name
from api_schemas.inference import BackendSpec
from rollout_service.errors import ConfigurationError, did_you_mean
from rollout_service.http.api_keys import KEY_COMMAND, ApiKey, check_unique, name_keys
from rollout_service.settings.gateway import GatewaySettings
from rollout_service.settings.harbor import HarborSettings
from rollout_service.settings.keys import known_keys
from rollout_service.settings.live import LiveSettings
from rollout_service.settings.section import Section
from rollout_service.settings.sources import ENV_PREFIX, HINT, Sources
from sandboxes.config import (
    ApptainerConfig,
    PressureConfig,
    ProviderConfig,
    WarmPoolConfig,
    default_state_dir,
)


class DefaultEngine(StrEnum):
    """The engine that serves the policy when no backend is configured."""

    EMBEDDED = "embedded"
    """The small CPU engine, started and stopped with the service."""
    NONE = "none"
    """No engine: backends are registered over HTTP."""


def _split(value: object) -> object:
    """Parse a variable that holds one value, several separated by commas, or a JSON list."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a valid JSON list: {error}") from None
    parts = [part.strip() for part in value.split(",")]
    if not all(parts):
        raise ValueError("the value is empty, or a part of it is; set it, or unset the variable")
    return parts


def _addresses(value: object) -> object:
    """Turn an engine that is only an address into one with default settings."""
    return (
        [{"url": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value
    )


def _pairs(value: object) -> object:
    """Turn a list of `NAME=VALUE`, as flags and variables give it, into a table."""
    if not isinstance(value, list):
        return value
    pairs = [str(one).partition("=") for one in value]
    wrong = [name for name, equals, inner in pairs if not (name and equals and inner)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not of the form NAME=VALUE")
    table = {name: inner for name, _, inner in pairs}
    if len(table) < len(pairs):
        raise ValueError("a name is given twice")
    return table


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]
Paths = Annotated[list[Path], NoDecode, BeforeValidator(_split)]
Backends = Annotated[list[BackendSpec], NoDecode, BeforeValidator(_addresses), BeforeValidator(_split)]
Models = Annotated[dict[Name, str], NoDecode, BeforeValidator(_pairs), BeforeValidator(_split)]
Keys = Annotated[list[ApiKey], NoDecode, BeforeValidator(name_keys), BeforeValidator(_split)]


class PipelineSettings(Section):
    """How many rollouts each stage holds at once.

    At most init_workers + rollout_queue + rollout_workers + evaluate_workers sandboxes are alive at any time, plus
    evaluate_queue for environments that are scored in the agent's own sandbox.
    """

    init_queue: int = Field(32, ge=1)
    """The most rollouts that wait for an init worker, after they were leased from the store."""
    init_workers: int = Field(8, ge=1)
    """The most rollouts being set up at once: starting their sandboxes, and the sessions of their tools."""
    rollout_queue: int = Field(2, ge=1)
    """The most rollouts that wait for a rollout worker, with their sandbox ready."""
    rollout_workers: int = Field(16, ge=1)
    """The most agents running at once."""
    evaluate_queue: int = Field(256, ge=1)
    """The most rollouts that wait for an evaluate worker, with their agent ended."""
    evaluate_workers: int = Field(4, ge=1)
    """The most rollouts being scored at once."""
    subagent_slots: int = Field(64, ge=1)
    """The most sub-agents at work at once, over all agents; agents get their slots in turn."""
    artifacts_bytes: int = Field(8 * 1024**3, ge=16 * 1024**2)
    """The most space that agents' artifacts may take on the host's temporary disk until they are scored; when it is
    full, rollouts wait for room."""
    max_attempts: int = Field(3, ge=1)
    """The most attempts at one rollout, including the first; only infrastructure failures are retried."""
    retry_seconds: float = Field(0.5, ge=0)
    """The wait before the second attempt; it doubles with every further attempt."""
    lease_seconds: float = Field(30.0, gt=0)
    """How long a rollout stays leased to a service that has stopped renewing the lease."""
    resume: bool = True
    """Whether a rollout that a crash or a shutdown interrupted continues from its last whole turn. For this, turns are
    saved in the background."""
    drain_seconds: float = Field(10.0, ge=0)
    """How long a shutdown waits for rollouts to end before it returns them to the store."""


class SandboxesSettings(Section):
    """How many sandboxes are alive at once, and how many are started ahead."""

    ceiling: int | None = Field(None, ge=2)
    """The most sandboxes alive at once, warm ones included; one is reserved for graders. Left out, as many as the
    stages can hold."""
    warm: WarmPoolConfig = WarmPoolConfig()
    pressure: PressureConfig = PressureConfig()


class EmbeddedSettings(Section):
    """The embedded engines, each a process of its own."""

    model: str = "calc-tuned"
    """The model: a shipped policy (`calc-base`, `calc-tuned`, `live-base`, `parl-base`), or the folder of a Qwen3
    checkpoint."""
    pools: Models = {}
    """The models of further pools, by the pool's name, such as `frozen-1 = "parl-base"` for frozen sub-agents. Each
    gets an engine of its own, whatever serves the policy."""
    threads: int = Field(1, ge=1)
    """The number of threads that each engine computes with."""

    @field_validator("pools")
    @classmethod
    def _policy_has_its_own_key(cls, pools: dict[str, str]) -> dict[str, str]:
        if "policy" in pools:
            raise ValueError("the model of the pool 'policy' is the key `model`")
        return pools


class PoolSettings(Section):
    """A pool of engines."""

    router: Literal["cost", "least_loaded"] = "cost"
    """How a backend is chosen: `cost` expects what each would take, prefix caches included; `least_loaded` only counts
    rollouts and requests, for engines that share no prefixes."""
    max_in_flight: int | None = Field(None, ge=1)
    """The most requests in flight at all backends together; more wait, and those of the oldest rollouts go first."""
    max_in_flight_per_backend: int | None = Field(None, ge=1)
    """The most requests in flight at each backend that was registered without a limit of its own."""
    stall_seconds: float = Field(60.0, gt=0)
    """How long a request may wait for an engine that shows no progress before it is sent to another."""


class HttpSettings(Section):
    """Limits on connections to the API."""

    max_head_bytes: int = Field(32 * 1024, ge=1_024)
    """The largest request line and headers."""
    head_seconds: float = Field(10.0, gt=0)
    """How long a peer may take to send a request's head, or to complete the TLS handshake."""
    body_seconds: float = Field(30.0, gt=0)
    """How long a peer may take to send a body; every 16 KiB received extend it by a second."""
    keep_alive_seconds: int = Field(20, ge=1)
    """How long a connection may be idle between two requests."""
    write_seconds: float = Field(120.0, gt=0)
    """How long a peer may leave its response unread."""
    max_connections: int | None = Field(None, ge=1)
    """The most open connections that have sent a valid key. Left out, 10,000, or fewer if the limit on open files is
    low: all connections take at most half of it."""


class StoreSettings(Section):
    """Where rollouts and results are kept. Left out, in a SQLite file in the state folder, for one node."""

    url: str | None = None
    """The Redis that the services of many nodes share: `redis://HOST:PORT/0`, `rediss://HOST:PORT/0` (TLS), or
    `unix:///PATH/redis.sock`. A password belongs in `password_file`."""
    prefix: str = Field("rollouts", pattern="^[A-Za-z0-9_.-]{1,64}$")
    """The name that the keys in Redis begin with: services with the same prefix do the same work."""
    password_file: Path | None = None
    """A file with the password of the Redis, which only its owner may read (mode 0600)."""
    folder: Path | None = None
    """The folder for trajectories, which are too large for the Redis; all nodes share it, under any path. Left out,
    they are in the Redis."""
    redis_durability: Literal["strict", "relaxed"] = "strict"
    """`strict` refuses a Redis that could lose what it acknowledged: it needs `appendonly yes` and `appendfsync
    always`. `relaxed` accepts that a crash of Redis loses work."""
    redis_replicas: int = Field(0, ge=0, le=16)
    """How many replicas of the Redis must have a write before it is acknowledged, so that a failover to them loses
    nothing. While there are fewer, work is refused."""

    @field_validator("url")
    @classmethod
    def _url_has_no_password(cls, url: str | None) -> str | None:
        parts = urlsplit(url or "redis://")
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ValueError("not the address of a Redis; use redis://, rediss:// or unix://")
        if parts.password is not None or "password=" in parts.query:
            raise ValueError("the URL contains a password; put it in a file, and set password_file")
        return url


class ClusterSettings(Section):
    """This node among those that share the store."""

    name: Name | None = None
    """The name of this node; every node that shares the store needs its own. Left out, the host name."""
    labels: Annotated[list[Name], NoDecode, BeforeValidator(_split)] = []
    """What this node has that environments may require, such as `gpu`: it runs only those whose `[sandbox] requires`
    it has."""
    address: str | None = Field(None, pattern="^https?://[^/]+$")
    """The URL at which others reach this node's API, as `GET /v1/nodes` shows it. Left out, made of `host` and
    `port`."""


class RetentionSettings(Section):
    """How long ended work is kept, in seconds. Left out, it is kept forever.

    Nothing is deleted before its trainer has acknowledged it. See docs/reference/runs.md, Retention.
    """

    ended_run_seconds: float | None = Field(None, ge=0)
    """Runs that are over, with everything that they produced."""
    settled_group_seconds: float | None = Field(None, ge=0)
    """Rollouts of groups that were acknowledged or dropped; the run's `retention` says when their tokens go."""
    rollout_seconds: float | None = Field(None, ge=0)
    """Rollouts that belong to no run, whether or not anyone has read them."""


class LogFormat(StrEnum):
    """The format of the log."""

    CONSOLE = "console"
    JSON = "json"


class Settings(BaseSettings):
    """All settings of the service."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    host: str = "127.0.0.1"
    """The address to listen on; an address beyond loopback requires `keys`."""
    port: int = Field(8080, ge=0, le=65_535)
    """The port to listen on; 0 picks a free one."""
    keys: Keys = []
    """The API's bearer keys; required beyond loopback. A key is a table with `name`, `role` (`read`, `submit`, or
    `admin`), and `key`, or just a value, which gets the role `admin`."""
    keys_file: Path | None = None
    """A TOML file with more keys, as `[[keys]]` tables. It may change while the service runs."""
    allowed_hosts: Names = []
    """Host names that requests may use for this server; `*.NAME` allows all subdomains. Left out, a server with keys
    answers to any name, and one without keys to the names of this machine. Web pages of a listed name may send
    changes."""
    path_prefix: str = Field("", pattern=r"^(/[A-Za-z0-9._~-]+)*$")
    """The prefix that a proxy leaves on the paths of requests, such as `/node/HOST/8080`. Requests without it are
    answered too, so a proxy that takes its prefix off needs no setting."""
    tls_certificate: Path | None = None
    """A PEM file with the server's certificate and its chain. If set, the API is served over HTTPS; a renewed file is
    used for new connections without a restart."""
    tls_key: Path | None = None
    """A PEM file with the certificate's private key, unless it is in the same file."""
    tls_key_password: SecretStr | None = None
    """The password of an encrypted private key."""
    state_dir: Path = Field(default_factory=default_state_dir)
    """The folder for the store, and for the record of the sandboxes' run folders; it must be on a local disk. Left out,
    `$XDG_STATE_HOME/rollout-service`, or `~/.local/state/rollout-service`."""
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1_024)
    """The largest request body."""
    http: HttpSettings = HttpSettings()
    environments: Paths = []
    """Environments to load: folders with an `environment.toml`, images that contain one, or folders of tasks in
    Harbor's format."""
    harbor: HarborSettings = HarborSettings()
    images_dir: Path | None = None
    """The folder for named images. Left out, `~/.cache/rollout-service/images`."""
    images_budget_bytes: int | None = Field(None, ge=0)
    """The most space for named images: the least recently used are removed, copies of pulled images first. Left out,
    there is no limit."""
    layers_dir: Path | None = None
    """The folder for layers of Dockerfiles, on a disk of this machine. Left out, `~/.cache/rollout-service/layers`."""
    layers_budget_bytes: int | None = Field(50 * 2**30, ge=0)
    """The most space for layers of Dockerfiles: the least recently used are removed after a build."""
    sandbox: ProviderConfig = Field(default_factory=ApptainerConfig)
    """What runs untrusted code. `provider = "local"` isolates nothing, and is never the default."""
    sandboxes: SandboxesSettings = SandboxesSettings()
    engine: DefaultEngine = DefaultEngine.EMBEDDED
    """What serves the policy when no backend is configured: the small CPU engine, or nothing until one is
    registered."""
    embedded: EmbeddedSettings = EmbeddedSettings()
    backends: Backends = []
    """Engines to register at the start; if there are any, the embedded engine is not started."""
    pools: dict[str, PoolSettings] = {}
    """Limits of the pools, by name, such as `[pools.judge]` with `max_in_flight = 64`."""
    gateway: GatewaySettings = GatewaySettings()
    live: LiveSettings = LiveSettings()
    pipeline: PipelineSettings = PipelineSettings()
    store: StoreSettings = StoreSettings()
    cluster: ClusterSettings = ClusterSettings()
    retention: RetentionSettings = RetentionSettings()
    hold_seconds: float = Field(300.0, gt=0)
    """How long an agent's request waits while its pool is paused."""
    log_format: LogFormat = LogFormat.CONSOLE
    """The format of the log: `console` for people, or `json` for programs, one object per line."""
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    """The lowest level that is logged: `debug`, `info`, `warning`, or `error`."""

    @field_validator("sandbox", mode="before")
    @classmethod
    def _provider_has_a_default(cls, sandbox: Any) -> Any:
        """Treat a table without `provider` as Apptainer's."""
        return {"provider": "apptainer"} | sandbox if isinstance(sandbox, dict) else sandbox

    _file: Path | None = PrivateAttr(None)

    @property
    def file(self) -> Path | None:
        """The settings file that was read, if any."""
        return self._file

    @model_validator(mode="after")
    def _keyed_beyond_loopback(self) -> Settings:
        if not self.is_keyed and not is_loopback(self.host):
            client = f" ({ENV_PREFIX}KEY is the client's)" if f"{ENV_PREFIX}KEY" in os.environ else ""
            raise ValueError(
                f"host {self.host} listens beyond loopback, but no key is set: set {ENV_PREFIX}KEYS{client}, "
                f"`keys` in rollout.toml, or --keys-file, or listen on 127.0.0.1. Generate a key with `{KEY_COMMAND}`"
            )
        check_unique(self.keys)
        if self.tls_key is not None and self.tls_certificate is None:
            raise ValueError("tls_key is set, but tls_certificate is not")
        return self

    @property
    def is_keyed(self) -> bool:
        """Whether the API requires a key."""
        return bool(self.keys) or self.keys_file is not None

    @property
    def sandbox_ceiling(self) -> int:
        """The most sandboxes alive at once: the setting, or what the stages and the warm pool can hold."""
        stages, warm = self.pipeline, self.sandboxes.warm
        bound = stages.init_workers + stages.rollout_queue + stages.rollout_workers
        bound += stages.evaluate_workers + stages.evaluate_queue
        return self.sandboxes.ceiling or bound + warm.size * warm.max_kinds

    @property
    def node_name(self) -> str:
        """The name of this node."""
        return (
            self.cluster.name
            or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64].lstrip("._-")
            or "node"
        )

    @property
    def address(self) -> str:
        """The URL at which others reach this node's API; a host that stands for all addresses becomes the host name."""
        if self.cluster.address is not None:
            return self.cluster.address
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104 - not bound here
        scheme = "http" if self.tls_certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def embedded_models(self) -> dict[str, str]:
        """The models of the embedded engines by pool; `policy` has none if other engines are configured."""
        has_own = self.engine is DefaultEngine.EMBEDDED and not self.backends
        return {**self.embedded.pools, **({"policy": self.embedded.model} if has_own else {})}

    @property
    def database(self) -> Path:
        """The store's database file."""
        return self.state_dir.expanduser() / "rollouts.sqlite3"


def is_loopback(host: str) -> bool:
    """Return whether a server bound to this host can be reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(config: Path | None = None, /, **flags: Any) -> Settings:
    """Read and validate the settings.

    Raises:
        ConfigurationError: A source cannot be read, or a value is invalid; the message names every such key.
    """
    return build_settings(read_sources(config, **flags))


def read_sources(config: Path | None = None, /, **flags: Any) -> Sources:
    """Read the flags, variables, and file that settings come from.

    Raises:
        ConfigurationError: A source cannot be read, or a variable is unknown.
    """
    path = config or Path(os.environ.get(f"{ENV_PREFIX}CONFIG", "rollout.toml"))
    must_exist = config is not None or f"{ENV_PREFIX}CONFIG" in os.environ
    given = {name: value for name, value in flags.items() if value is not None}
    sources = Sources.read(given, os.environ, path, must_exist=must_exist)
    sources.check_variables(Settings)
    return sources


def build_settings(sources: Sources) -> Settings:
    """Validate the sources, and build the settings from them.

    Raises:
        ConfigurationError: A value is invalid; the message says where each one was set.
    """

    class _Layered(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            table = InitSettingsSource(settings_cls, init_kwargs=dict(sources.table))
            return init_settings, env_settings, table

    try:
        settings = _Layered(**sources.flags)
    except ValidationError as error:
        raise ConfigurationError(_explain(error, sources), hint=HINT) from None  # it would show the values
    settings._file = sources.file
    return settings


def _explain(error: ValidationError, sources: Sources) -> str:
    known = known_keys(Settings)
    lines = []
    for item in error.errors():
        path = _without_tags([str(part) for part in item["loc"]])
        dotted, where = ".".join(path), sources.source(path).where
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            text = f"unknown setting{did_you_mean(dotted, known)}"
        lines.append(": ".join(filter(None, [where, dotted, text])))
    return "\n".join(lines)


def _without_tags(path: list[str]) -> list[str]:
    """Return the path without the tags that pydantic adds for union members, such as `sandbox.apptainer`."""
    if path[:1] == ["sandbox"] and len(path) > 2:
        return [path[0], *path[2:]]
    return path
