"""The real vLLM on a CPU, for tests; `scripts/install-vllm` installs it in a separate environment."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from rollout_service.inference.local_servers.process import (
    EngineStartError,
    ServerCommand,
    ServerProcess,
    free_port,
)

_ROOT = Path(__file__).parents[3]
DEFAULT_ENVIRONMENT = _ROOT / ".venv-vllm"
CACHE_BLOCK = 32
"""Tokens per block of its prefix cache: the fewest that its CPU attention accepts."""


class VllmCpuServer(ServerProcess):
    """Serves the model in `model_path` with vLLM, in float32, at `url` while the context lasts.

    The server and its workers end with the context, and also when this process is killed.

    Raises:
        EngineStartError: vLLM is not installed or does not start; raised on entering.
    """

    start_seconds = 420.0

    def __init__(
        self,
        model_path: Path | str,
        *,
        env_dir: Path | None = None,
        port: int = 0,
        kv_gigabytes: int = 1,
        max_running: int = 32,
        threads: int = 1,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        """Take `env_dir`, where vLLM is installed, and a port, where 0 takes a free one."""
        super().__init__(on_wait=on_wait)
        self._model_path = Path(model_path).resolve()
        self._env_dir = env_dir or Path(os.environ.get("ROLLOUT_VLLM_ENV", DEFAULT_ENVIRONMENT))
        self._kv_gigabytes = kv_gigabytes
        self._max_running = max_running
        self._threads = threads
        self._port = port or free_port()

    def _server_command(self, folder: Path) -> ServerCommand:
        python = self._env_dir / "bin" / "python"
        if not python.exists():
            raise EngineStartError(f"vLLM is not installed in {self._env_dir}; run scripts/install-vllm")
        # The kernel ends the server when this process ends, with a signal that lets it end its workers first.
        setpriv = shutil.which("setpriv")
        command = [
            *([setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []),
            # The command `vllm` looks for a distribution of that name, which the CPU build lacks.
            *(str(python), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self._model_path), "--host", "127.0.0.1", "--port", str(self._port)),
            *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(self._max_running)),
            *("--block-size", str(CACHE_BLOCK), "--logprobs-mode", "processed_logprobs"),
            *("--enable-scale-out", "--enable-prompt-tokens-details"),
        ]
        return ServerCommand(command, self._environment(folder), lambda: self._port)

    def _environment(self, folder: Path) -> dict[str, str]:
        return {
            "PATH": f"{self._env_dir / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(folder),  # it writes caches
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self._kv_gigabytes),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(self._threads),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
