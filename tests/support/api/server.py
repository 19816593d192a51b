"""A real server, without an engine unless asked for, for tests of its API."""

import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import anyio

from tests.support.processes.service import Running, eventually, running

STARTED = "Application startup complete"


@contextmanager
def api_server(
    folder: Path,
    *flags: str,
    before: Sequence[str] = (),
    engine: str = "none",
    sandbox: str = "local",
    **variables: str,
) -> Iterator[Running]:
    """Serve from a folder; with an engine, wait until rollouts can begin."""
    arguments = ["rollout_service.cli", "serve", "--engine", engine, "--sandbox", sandbox, "--port", "0"]
    arguments += ["--port-file", str(folder / "server.address"), "--state-dir", str(folder / "state"), *flags]
    log = folder / "server.log"
    starts = log.read_text().count(STARTED) if log.exists() else 0
    with running("server", arguments, folder, before, **variables) as server:
        # The address is written before it answers.
        eventually(lambda: server.log.count(STARTED) > starts or server.process.poll() is not None, server)
        if engine != "none":
            server.wait_until_ready()
        yield server
        if server.process.poll() is None:
            server.stop()
            server.ended(30)


@contextmanager
def filled_server(folder: Path, fill: Callable[[Path], Awaitable[None]]) -> Iterator[str]:
    """Serve a store that `fill` has written to; yield the address."""
    (folder / "state").mkdir()
    anyio.run(fill, folder / "state" / "rollouts.sqlite3")
    with api_server(folder) as server:
        yield server.url


def make_certificate(folder: Path, days: int = 2) -> tuple[Path, Path]:
    """Write a self-signed certificate for this machine, and its key."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    kind = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", str(days)]
    command = [*kind, "-keyout", str(key), "-out", str(certificate), *names]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key
