"""The embedded engine as a child process of the service, which ends with it."""

import os
import sys
from pathlib import Path

from rollout_service.engines.local_servers.process import ServerCommand, ServerProcess


class EmbeddedEngine(ServerProcess):
    """Serves the model in `model_path` at `url` while the context lasts; ends also when this process is killed.

    Raises:
        EngineStartError: The model cannot be served; raised on entering, with the engine's message.
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        port: int = 0,
        kv_tokens: int = 131_072,
        threads: int = 1,
        weight_version: str = "default",
    ) -> None:
        """`port` 0 is a free one; the engine's `--help` explains the rest."""
        super().__init__()
        self._arguments = [
            *("--model", str(Path(model_path).resolve())),
            *("--port", str(port)),
            *("--kv-tokens", str(kv_tokens), "--threads", str(threads), "--weight-version", weight_version),
            "--exit-with-parent",
        ]

    def _server_command(self, folder: Path) -> ServerCommand:
        port_file = folder / "port"

        def read_port() -> int | None:
            return int(port_file.read_text()) if port_file.exists() else None

        module = "rollout_service.engines.kinds.embedded"
        command = [sys.executable, "-m", module, *self._arguments, "--port-file", str(port_file)]
        return ServerCommand(command, os.environ, read_port)
