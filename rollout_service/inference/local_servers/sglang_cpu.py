"""The real SGLang on a CPU, for tests and the demo; `scripts/install-sglang` installs it in a separate environment."""

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
DEFAULT_ENVIRONMENT = _ROOT / ".venv-sglang"
_STAND_INS = _ROOT / "deploy" / "sglang-cpu"


class SGLangCpuServer(ServerProcess):
    """Serves the model in `model_path` with SGLang, in float32, at `url` while the context lasts.

    The server and its workers end with the context, and also when this process is killed.

    Raises:
        EngineStartError: SGLang is not installed or does not start; raised on entering.
    """

    start_seconds = 180.0

    def __init__(
        self,
        model_path: Path | str,
        *,
        env_dir: Path | None = None,
        port: int = 0,
        kv_tokens: int = 20_000,
        max_running: int = 32,
        threads: int = 1,
        routed_experts: bool = False,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        """Take `env_dir`, where SGLang is installed, and a port, where 0 takes a free one.

        With `routed_experts` the server can report which experts read each token.
        """
        super().__init__(on_wait=on_wait)
        self._model_path = Path(model_path).resolve()
        self._env_dir = env_dir or Path(os.environ.get("ROLLOUT_SGLANG_ENV", DEFAULT_ENVIRONMENT))
        self._kv_tokens = kv_tokens
        self._max_running = max_running
        self._threads = threads
        self._routed_experts = routed_experts
        self._port = port or free_port()

    def _server_command(self, folder: Path) -> ServerCommand:
        if not _STAND_INS.is_dir():
            raise EngineStartError("SGLang on a CPU needs a checkout of this project: use scripts/demo there")
        python = self._env_dir / "bin" / "python"
        if not python.exists():
            raise EngineStartError(f"SGLang is not installed in {self._env_dir}; run scripts/install-sglang")
        # The kernel ends the server when this process ends; its workers watch the server themselves.
        setpriv = shutil.which("setpriv")
        command = [
            *([setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []),
            *(str(python), "-m", "sglang.launch_server"),
            *("--model-path", str(self._model_path), "--host", "127.0.0.1", "--port", str(self._port)),
            *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
            *("--dtype", "float32", "--tp", "1", "--mem-fraction-static", "0.5"),
            *("--max-total-tokens", str(self._kv_tokens), "--max-running-requests", str(self._max_running)),
            *("--enable-metrics", "--sleep-on-idle"),  # else an idle server keeps a core busy
            *(["--enable-return-routed-experts"] if self._routed_experts else []),
        ]
        return ServerCommand(command, self._environment(folder), lambda: self._port)

    def _environment(self, folder: Path) -> dict[str, str]:
        return {
            "PATH": f"{self._env_dir / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(folder),  # it writes caches
            "PYTHONPATH": str(_STAND_INS),
            "SGLANG_USE_CPU_ENGINE": "1",
            # SGLang keeps experts in memory that a GPU can write to, which has to be simulated here.
            **({"SGLANG_CPU_LOCKS_NO_PAGES": "1"} if self._routed_experts else {}),
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(self._threads),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
