"""The service's settings: flags over `ROLLOUT_*` environment variables over `rollout.toml` over defaults.

Guarantees: every key is known (an unknown one is refused together with the nearest known key), and a service
that listens beyond loopback without a key does not start. Nested keys are tables in TOML and `__` in variables:
`[pipeline] rollout_workers = 64` is `ROLLOUT_PIPELINE__ROLLOUT_WORKERS=64`.
"""

from __future__ import annotations

import ipaddress
import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
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

from api_schemas.inference import BackendSpec
from rollout_service.errors import ConfigurationError, did_you_mean
from rollout_service.http.api_keys import KEY_COMMAND, ApiKey, check_unique, name_keys
from rollout_service.settings.keys import known_keys
from rollout_service.settings.sources import ENV_PREFIX, HINT, Sources
from sandboxes.config import (
    ApptainerConfig,
    PressureConfig,
    ProviderConfig,
    WarmPoolConfig,
    default_state_dir,
)


class DefaultEngine(StrEnum):
    """What serves the policy when no backend is named."""

    EMBEDDED = "embedded"
    """The small CPU engine, started and ended with the service."""
    NONE = "none"
    """Nothing: backends are registered over HTTP."""


def _split(value: object) -> object:
    """Read a variable that holds one value, several with commas between, or a JSON list."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not a valid JSON list: {error}") from None
    parts = [part.strip() for part in value.split(",")]
    if not all(parts):
        raise ValueError("the variable holds an empty value; give it one, or unset it")
    return parts


def _addresses(value: object) -> object:
    """Take an engine that is only an address as one with the usual settings."""
    return (
        [{"url": one} if isinstance(one, str) else one for one in value] if isinstance(value, list) else value
    )


Names = Annotated[list[str], NoDecode, BeforeValidator(_split)]
Paths = Annotated[list[Path], NoDecode, BeforeValidator(_split)]
Backends = Annotated[list[BackendSpec], NoDecode, BeforeValidator(_addresses), BeforeValidator(_split)]
Keys = Annotated[list[ApiKey], NoDecode, BeforeValidator(name_keys), BeforeValidator(_split)]


class Section(BaseModel):
    """A table of the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PipelineSettings(Section):
    """How many rollouts are in each stage at once.

    Sandboxes alive at any time: at most init_workers + rollout_queue + rollout_workers + evaluate_workers, plus
    evaluate_queue for environments that are scored in the agent's own sandbox.
    """

    init_queue: int = Field(32, ge=1)
    """Rollouts leased from the store that wait for an init worker."""
    init_workers: int = Field(8, ge=1)
    """Rollouts being set up at once: their sandboxes start, with the sessions of their tools."""
    rollout_queue: int = Field(2, ge=1)
    """Rollouts whose sandbox is ready and that wait for a rollout worker."""
    rollout_workers: int = Field(16, ge=1)
    """Agents at work at once."""
    evaluate_queue: int = Field(256, ge=1)
    """Rollouts whose agent has ended and that wait for an evaluate worker."""
    evaluate_workers: int = Field(4, ge=1)
    """Outcomes being scored at once."""
    artifacts_bytes: int = Field(8 * 1024**3, ge=16 * 1024**2)
    """The space on the host's temporary disk for what agents left until it is scored; agents wait for room."""
    max_attempts: int = Field(3, ge=1)
    """Attempts at one rollout, the first included; only infrastructure failures are tried again."""
    retry_seconds: float = Field(0.5, ge=0)
    """The wait before the second attempt; it doubles with every further one."""
    lease_seconds: float = Field(30.0, gt=0)
    """How long a rollout stays with a service that has stopped renewing its lease."""
    drain_seconds: float = Field(10.0, ge=0)
    """How long a shutdown waits for rollouts to end before it hands them back to the store."""


class SandboxesSettings(Section):
    """How many sandboxes are alive at once, and which are started ahead."""

    ceiling: int | None = Field(None, ge=2)
    """Never more than so many, warm ones included; one place is for graders. Left out, what the stages can hold."""
    warm: WarmPoolConfig = WarmPoolConfig()
    pressure: PressureConfig = PressureConfig()


class EmbeddedSettings(Section):
    """The embedded engine."""

    model: str = "calc-tuned"
    """A shipped policy (`calc-base`, `calc-tuned`) or the folder of a Qwen3 checkpoint."""
    threads: int = Field(1, ge=1)
    """Threads that it computes with."""


class PoolSettings(Section):
    """A pool of engines."""

    router: Literal["cost", "least_loaded"] = "cost"
    """How a backend is chosen: `cost` expects what each would take, prefix caches included; `least_loaded` only counts
    rollouts and requests, for engines that share no prefixes."""
    max_in_flight: int | None = Field(None, ge=1)
    """Requests that all its backends together work on; further ones wait, those of the oldest rollouts first."""
    max_in_flight_per_backend: int | None = Field(None, ge=1)
    """The same for each backend that was registered without a limit of its own."""
    stall_seconds: float = Field(60.0, gt=0)
    """How long a call may be open at an engine that shows no progress before it goes to another."""


class HttpSettings(Section):
    """The limits of connections to the API."""

    max_head_bytes: int = Field(32 * 1024, ge=1_024)
    """The request line and the headers."""
    head_seconds: float = Field(10.0, gt=0)
    """How long a peer may take to send a request's head, or for its TLS handshake."""
    body_seconds: float = Field(30.0, gt=0)
    """How long a peer may take to send a body; every 16 KiB that have come add a second."""
    keep_alive_seconds: int = Field(20, ge=1)
    """How long a connection may be idle between two requests."""
    write_seconds: float = Field(120.0, gt=0)
    """How long a peer may leave its answer unread."""
    max_connections: int | None = Field(None, ge=1)
    """Connections that have sent a valid key, open at once. Left out, 10,000, or fewer where the limit of open files
    is low: all connections take at most half of it."""


class RetentionSettings(Section):
    """How long what has ended is kept, in seconds; for ever when left out.

    Nothing is deleted that a trainer has still to acknowledge. See docs/reference/runs.md, Retention.
    """

    ended_run_seconds: float | None = Field(None, ge=0)
    """Runs that are over, with all that they made."""
    settled_group_seconds: float | None = Field(None, ge=0)
    """The rollouts of groups that were acknowledged or dropped; their tokens go earlier, by the run's `retention`."""
    rollout_seconds: float | None = Field(None, ge=0)
    """Rollouts that belong to no run, read or not: nobody acknowledges them."""


class LogFormat(StrEnum):
    """How the log is written."""

    CONSOLE = "console"
    JSON = "json"


class Settings(BaseSettings):
    """Everything that can be set."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    host: str = "127.0.0.1"
    """The address to listen on; beyond loopback it needs `keys`."""
    port: int = Field(8080, ge=0, le=65_535)
    """The port to listen on; 0 takes a free one."""
    keys: Keys = []
    """Bearer keys of the API; needed beyond loopback. A key is a value, which has the role `admin`, or a table with
    `name`, `role` (`read`, `submit`, `admin`) and `key`."""
    keys_file: Path | None = None
    """A TOML file with more of them as `[[keys]]` tables, which may change while the service runs."""
    allowed_hosts: Names = []
    """Names that requests may use for this server, `*.NAME` for all below one. Left out, a server with keys answers to
    any name, and one without to those of this machine. Pages of a listed name may send orders."""
    tls_certificate: Path | None = None
    """A PEM file with the server's certificate and its chain; with it the API is HTTPS. A renewed one is used for new
    connections without a restart."""
    tls_key: Path | None = None
    """A PEM file with the key of the certificate, unless that is in the same file."""
    tls_key_password: SecretStr | None = None
    """The password of an encrypted key."""
    state_dir: Path = Field(default_factory=default_state_dir)
    """Where the store is kept, and which run folders of sandboxes were in use; on a local disk. Left out,
    `$XDG_STATE_HOME/rollout-service`, or `~/.local/state/rollout-service`."""
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1_024)
    """A larger request is refused."""
    http: HttpSettings = HttpSettings()
    environments: Paths = []
    """Folders with an `environment.toml`, or images that carry one."""
    images_dir: Path | None = None
    """Where named images are; `~/.cache/rollout-service/images` when left out."""
    images_budget_bytes: int | None = Field(None, ge=0)
    """How much they may take: the least recently used go, copies of pulled ones first. No limit when left out."""
    sandbox: ProviderConfig = Field(default_factory=ApptainerConfig)
    """What runs untrusted code; `provider = "local"` isolates nothing and must be asked for."""
    sandboxes: SandboxesSettings = SandboxesSettings()
    engine: DefaultEngine = DefaultEngine.EMBEDDED
    """What serves the policy when no backend is named: the small CPU engine, or nothing until one is registered."""
    embedded: EmbeddedSettings = EmbeddedSettings()
    backends: Backends = []
    """Engines to register at the start; with any of these the embedded engine is not started."""
    pools: dict[str, PoolSettings] = {}
    """Limits of the pools, by name: `[pools.judge]` with `max_in_flight = 64`."""
    pipeline: PipelineSettings = PipelineSettings()
    retention: RetentionSettings = RetentionSettings()
    hold_seconds: float = Field(300.0, gt=0)
    """How long a request of an agent waits while its pool is paused."""
    log_format: LogFormat = LogFormat.CONSOLE
    """`console` for people, `json` for programs: an object a line."""
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$")
    """The least severe messages that are logged: `debug`, `info`, `warning` or `error`."""

    @field_validator("sandbox", mode="before")
    @classmethod
    def _provider_has_a_default(cls, sandbox: Any) -> Any:
        """Take a table without `provider` for one of Apptainer."""
        return {"provider": "apptainer"} | sandbox if isinstance(sandbox, dict) else sandbox

    _file: Path | None = PrivateAttr(None)

    @property
    def file(self) -> Path | None:
        """The settings file that was read, if there was one."""
        return self._file

    @model_validator(mode="after")
    def _keyed_beyond_loopback(self) -> Settings:
        if not self.is_keyed and not is_loopback(self.host):
            client = f" ({ENV_PREFIX}KEY is the client's)" if f"{ENV_PREFIX}KEY" in os.environ else ""
            raise ValueError(
                f"host {self.host} listens beyond loopback and no key is set: set {ENV_PREFIX}KEYS{client}, "
                f"`keys` in rollout.toml or --keys-file, or listen on 127.0.0.1; make a key with `{KEY_COMMAND}`"
            )
        check_unique(self.keys)
        if self.tls_key is not None and self.tls_certificate is None:
            raise ValueError("tls_key is set, and tls_certificate is not")
        return self

    @property
    def is_keyed(self) -> bool:
        """Whether the API asks for a key."""
        return bool(self.keys) or self.keys_file is not None

    @property
    def sandbox_ceiling(self) -> int:
        """How many sandboxes may be alive: as set, or what the stages and the warm pool can hold in all."""
        stages, warm = self.pipeline, self.sandboxes.warm
        bound = stages.init_workers + stages.rollout_queue + stages.rollout_workers
        bound += stages.evaluate_workers + stages.evaluate_queue
        return self.sandboxes.ceiling or bound + warm.size * warm.max_kinds

    @property
    def database(self) -> Path:
        """The file of the store."""
        return self.state_dir.expanduser() / "rollouts.sqlite3"


def is_loopback(host: str) -> bool:
    """Whether a server that binds this host can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def load_settings(config: Path | None = None, /, **flags: Any) -> Settings:
    """Read the settings; raises ConfigurationError that names every key at fault and what to write instead."""
    return build_settings(read_sources(config, **flags))


def read_sources(config: Path | None = None, /, **flags: Any) -> Sources:
    """Collect what flags, variables and the file say; raises ConfigurationError for what cannot be read."""
    path = config or Path(os.environ.get(f"{ENV_PREFIX}CONFIG", "rollout.toml"))
    must_exist = config is not None or f"{ENV_PREFIX}CONFIG" in os.environ
    given = {name: value for name, value in flags.items() if value is not None}
    sources = Sources.read(given, os.environ, path, must_exist=must_exist)
    sources.check_variables(Settings)
    return sources


def build_settings(sources: Sources) -> Settings:
    """Make settings of what was given; raises ConfigurationError that says where each mistake stands."""

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
        raise ConfigurationError(_explain(error, sources), hint=HINT) from None  # it shows what was given
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
    """Return the path without pydantic's tags for one of several tables, such as `sandbox.apptainer`."""
    if path[:1] == ["sandbox"] and len(path) > 2:
        return [path[0], *path[2:]]
    return path
