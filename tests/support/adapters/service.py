"""A service and a scripted engine as separate processes, for the tests of adapters and examples."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 120.0


@contextmanager
def engine(folder: Path, *turns: str) -> Iterator[str]:
    """Run an engine that samples these turns; yield its URL."""
    command = [sys.executable, "-m", "rollout_service.testing", "--address", str(folder / "engine")]
    for turn in turns:
        command += ["--turn", turn]
    with _running(command, folder / "engine", folder / "engine.log") as url:
        yield url


@contextmanager
def service(folder: Path, *flags: str, sandbox: str = "local") -> Iterator[str]:
    """Run a service; yield its URL."""
    command = [sys.executable, "-m", "rollout_service.cli", "serve", "--port", "0", "--sandbox", sandbox]
    command += ["--state-dir", str(folder / "state"), "--port-file", str(folder / "server"), *flags]
    with _running(command, folder / "server", folder / "server.log") as url:
        yield url


@contextmanager
def _running(command: list[str], address: Path, log: Path) -> Iterator[str]:
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            yield _started(process, address, log)
        finally:
            process.terminate()
            process.wait(60)


def _started(process: subprocess.Popen[bytes], address: Path, log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if address.exists() and (url := address.read_text().strip()):
            return url
        time.sleep(0.05)
    raise AssertionError(f"the process did not start: {log.read_text()}")
