"""All settings of the service, and the values that follow from several of them.

A service that listens beyond loopback without a key does not start.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from rollout_service.base import private_files
from rollout_service.http.keyring import KEY_COMMAND, check_unique
from rollout_service.settings.engines import DefaultEngine, EmbeddedSettings, PoolSettings
from rollout_service.settings.http import E2BApiSettings, GatewaySettings, HttpSettings
from rollout_service.settings.live import LiveSettings
from rollout_service.settings.pipeline import HarborSettings, PipelineSettings, SandboxesSettings, SecretsSettings
from rollout_service.settings.sources import ENV_PREFIX
from rollout_service.settings.store import ClusterSettings, RetentionSettings, StoreSettings
from rollout_service.settings.values import Backends, Keys, Names, Paths
from sandboxes.config import ApptainerConfig, ProviderConfig, default_state_dir


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
        allow_inf_nan=False,
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
    """The folder for the store, and for the record of the sandboxes' run folders; it must be on a local disk, unless
    `store.disk` says otherwise. Left out, `$XDG_STATE_HOME/rollout-service`, or `~/.local/state/rollout-service`."""
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1_024)
    """The largest body of a request with tasks, rollouts or weights; of any other request, at most 1 MiB."""
    http: HttpSettings = HttpSettings()
    environments: Paths = []
    """Environments to load: folders with an `environment.toml`, images that contain one, folders of tasks in
    Harbor's format, Python files with one, or `module:object`."""
    harbor: HarborSettings = HarborSettings()
    secrets: SecretsSettings = SecretsSettings()
    data_dirs: Paths = []
    """The folders whose files, with those below, may be the tasks of a run that a key with the role `submit` creates
    (`source.kind` = `file`). A key with the role `admin` may name any file that the service can read."""
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
    """The sandbox provider, for untrusted code. `provider = "local"` isolates nothing, and is never the default."""
    sandboxes: SandboxesSettings = SandboxesSettings()
    engine: DefaultEngine = DefaultEngine.EMBEDDED
    """The engine that serves the policy when no backend is configured: the small CPU engine, or none until one is
    registered."""
    embedded: EmbeddedSettings = EmbeddedSettings()
    backends: Backends = []
    """Engines to register at the start; if there are any, the embedded engine is not started."""
    pools: dict[str, PoolSettings] = {}
    """Limits of the pools, by name, such as `[pools.judge]` with `max_in_flight = 64`."""
    gateway: GatewaySettings = GatewaySettings()
    live: LiveSettings = LiveSettings()
    e2b: E2BApiSettings = E2BApiSettings()
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
        return self._file

    @model_validator(mode="after")
    def _keyed_beyond_loopback(self) -> Settings:
        if not self.is_keyed and not is_loopback(self.host):
            client = f" ({ENV_PREFIX}KEY is the client's)" if f"{ENV_PREFIX}KEY" in os.environ else ""
            raise ValueError(
                f"host {self.host} listens beyond loopback, but no key is set: set {ENV_PREFIX}KEYS{client}, "
                f"`keys` in rollout.toml, or --keys-file, or listen on 127.0.0.1. Generate a key with `{KEY_COMMAND}`"
            )
        if self.e2b.enabled and not self.is_keyed and not is_loopback(self.e2b.host):
            raise ValueError(f"e2b.host {self.e2b.host} listens beyond loopback, but no key is set: set `keys`")
        check_unique(self.keys)
        if self.tls_key is not None and self.tls_certificate is None:
            raise ValueError("tls_key is set, but tls_certificate is not")
        return self

    @property
    def is_keyed(self) -> bool:
        return bool(self.keys) or self.keys_file is not None

    @property
    def sandbox_ceiling(self) -> int:
        """The most sandboxes alive at once: the setting, or the capacity of the stages and the warm pool."""
        stages, warm = self.pipeline, self.sandboxes.warm
        bound = stages.init_workers + stages.rollout_queue + stages.rollout_workers
        bound += stages.evaluate_workers + stages.evaluate_queue
        return self.sandboxes.ceiling or bound + warm.size * warm.max_kinds

    @property
    def node_name(self) -> str:
        return self.cluster.name or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64].lstrip("._-") or "node"

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
        return self.state_dir.expanduser() / private_files.STORE


def is_loopback(host: str) -> bool:
    """Return whether a server bound to this host can be reached only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
