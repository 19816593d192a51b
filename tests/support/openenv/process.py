"""Starts `servers.py` with the real OpenEnv, which `scripts/test` installs."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".cache" / "openenv" / "bin" / "python"
"""The interpreter with the package; see `ensure_openenv` in scripts/lib.sh."""


class RealOpenEnv:
    """A process with servers of OpenEnv and with its client."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url: str = self._reply()["url"]

    def play(self, url: str, reset: dict[str, Any], *actions: dict[str, Any]) -> dict[str, Any]:
        """Play with the package's own client."""
        self._process.stdin.write(json.dumps({"url": url, "reset": reset, "actions": actions}) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        assert line, "the process with OpenEnv has ended; its errors are above"
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def real_openenv() -> Iterator[RealOpenEnv]:
    """Run the process within the block."""
    program = Path(__file__).with_name("servers.py")
    with subprocess.Popen([PYTHON, "-P", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield RealOpenEnv(process)
        finally:
            process.kill()
