"""A real Redis as a process of a test: started, stopped, killed, paused, and given too little memory."""

import os
import subprocess
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import redis

from rollout_service.store.redis import RedisConfig
from tests.support.processes.server_process import ServerProcess, in_own_folder

ROOT = Path(__file__).parents[2]
START_SECONDS = 30.0
_numbers = count(1)


@cache
def program() -> str:
    """Return the path of redis-server, which `scripts/test` has installed."""
    done = subprocess.run([ROOT / "scripts/install-redis"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Tls:
    """The files of a server that speaks TLS: its certificate, its key, and the authority that clients trust."""

    certificate: Path
    key: Path
    authority: Path

    @property
    def options(self) -> list[str]:
        files = ["--tls-cert-file", self.certificate, "--tls-key-file", self.key]
        files += ["--tls-ca-cert-file", self.authority, "--tls-auth-clients", "no"]
        return [str(each) for each in files]


@dataclass
class RedisServer(ServerProcess):
    """A Redis in a folder of its own, on a Unix socket and, if it has a port, on TCP."""

    folder: Path
    port: int = 0
    password: str | None = None
    tls: Tls | None = None
    options: dict[str, str] = field(default_factory=dict)
    process: psutil.Popen | None = None
    executable: str | Path = ""
    """The server program; that of Redis if it is empty."""

    @property
    def socket(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def log(self) -> str:
        return (self.folder / "redis.log").read_text()

    @property
    def url(self) -> str:
        if not self.port:
            return f"unix://{self.socket}"
        if self.tls:
            return f"rediss://localhost:{self.port}/0?ssl_ca_certs={self.tls.authority}"
        return f"redis://127.0.0.1:{self.port}/0"

    def config(self, prefix: str | None = None, **changes: Any) -> RedisConfig:
        """Return the settings of a store here; without a prefix, under one that no other test uses."""
        config = RedisConfig(self.url, prefix or f"t{os.getpid()}-{next(_numbers)}")
        if self.password is not None:
            config = replace(config, password_file=self.folder / "password")
        return replace(config, **changes)

    def owner(self, config: RedisConfig) -> "RedisServer":
        """Return the server that has a store: this one, as it is in no cluster."""
        del config
        return self

    def client(self) -> redis.Redis:
        """Return a client; close it."""
        return redis.Redis(unix_socket_path=str(self.socket), password=self.password)

    def do(self, *command: str | int) -> Any:
        """Run one command."""
        with self.client() as client:
            return client.execute_command(*command)

    def start(self) -> None:
        """Start it and wait until it has read its files; what was durable before is there again."""
        options = {
            "port": "0",
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "unixsocketperm": "700",
        }
        options |= {"dir": str(self.folder), "unixsocket": str(self.socket), "logfile": "redis.log"}
        if self.port:
            options |= {"tls-port" if self.tls else "port": str(self.port), "bind": "127.0.0.1"}
        if self.password is not None:
            (self.folder / "password").touch(0o600)
            (self.folder / "password").write_text(self.password + "\n")
            options |= {"requirepass": self.password}
        lines = [f'{name} "{value}"' for name, value in (options | self.options).items()]
        (self.folder / "redis.conf").write_text("\n".join(lines) + "\n")
        self.socket.unlink(missing_ok=True)
        tls = self.tls.options if self.tls else []
        self.process = psutil.Popen(
            [self.executable or program(), self.folder / "redis.conf", *tls],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            cwd=self.folder,
        )
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self.log
            try:
                self.do("PING")
            except redis.RedisError:
                assert time.monotonic() < end, self.log
                time.sleep(0.01)
            else:
                return


def redis_server(**options: Any) -> AbstractContextManager[RedisServer]:
    """Run a Redis for the block."""
    return in_own_folder(lambda folder: RedisServer(folder, **options), "redis-")
