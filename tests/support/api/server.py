"""A real server, without an engine unless asked for, for tests of its API."""

import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx

from tests.support.processes.children import killed

START_SECONDS = 90.0


@dataclass
class ApiServer:
    """A listening server."""

    url: str
    log_file: Path
    process: subprocess.Popen[bytes]

    @property
    def log(self) -> str:
        return self.log_file.read_text()


@contextmanager
def api_server(
    folder: Path, *flags: str, before: Sequence[str] = (), engine: str = "none", **variables: str
) -> Iterator[ApiServer]:
    """Serve from a folder; `before` is a command that starts the server, such as `prlimit`.

    With an engine, wait until rollouts can begin.
    """
    address, log = folder / "address", folder / "log"
    fixed = ["--port", "0", "--port-file", str(address), "--state-dir", str(folder / "state")]
    command = [*before, sys.executable, "-m", "rollout_service.cli", "serve", "--engine", engine]
    command += ["--sandbox", "local", *fixed, *flags]
    with log.open("wb") as output:
        started = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=folder, env=os.environ | variables
        )
        with killed(started) as process:
            try:
                _wait_until_started(process, log)
                if engine != "none":
                    _wait_until_ready(process, address.read_text(), log)
                yield ApiServer(address.read_text(), log, process)
            finally:
                process.terminate()
                process.wait(30)


@contextmanager
def filled_server(folder: Path, fill: Callable[[Path], Awaitable[None]]) -> Iterator[str]:
    """Serve a store that `fill` has written to; yield the address."""
    (folder / "state").mkdir()
    anyio.run(fill, folder / "state" / "rollouts.sqlite3")
    with api_server(folder) as server:
        yield server.url


def _wait_until_started(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while "Application startup complete" not in log.read_text():  # the address is written before it answers
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not httpx.get(f"{url}/ready", timeout=30).is_success:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()[-4_000:]
        time.sleep(0.05)


def make_certificate(folder: Path, days: int = 2) -> tuple[Path, Path]:
    """Write a self-signed certificate for this machine, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    kind = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", str(days)]
    command = [*kind, "-keyout", str(key), "-out", str(certificate), *names]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
