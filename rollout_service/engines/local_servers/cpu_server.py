"""A real engine on a CPU, run by the Python of its own environment, which a script of this project installs.

Nothing is downloaded; the kernel ends the server when this process is killed, so no server outlives it.
"""

import os
import shlex
import shutil
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from rollout_service.engines.local_servers.process import (
    EngineStartError,
    ServerCommand,
    ServerProcess,
)
from sandboxes.host.ports import free_port

CHECKOUT = Path(__file__).parents[3]
"""The checkout of this project, where scripts install the engines."""
MAX_RUNNING = 32
"""Requests sampled at once; others wait in the server's queue."""
_THREADS = 1


class CpuServer(ServerProcess):
    """Serves the model in `model_path`, in float32, at `url` while the context lasts.

    Raises:
        EngineStartError: The engine is not installed or does not start; raised on entering.
    """

    engine: ClassVar[str]
    installer: ClassVar[str]
    default_env_dir: ClassVar[Path]
    """The folder that the script installs it in."""
    env_variable: ClassVar[str]
    """The environment variable that names another folder."""
    death_signal: ClassVar[str]
    """The signal that the kernel sends the server when this process ends; its workers must end too."""

    def __init__(self, model_path: Path | str, *, env_dir: Path | None = None) -> None:
        super().__init__()
        self._model_path = Path(model_path).resolve()
        self._env_dir = env_dir or Path(os.environ.get(self.env_variable, self.default_env_dir))

    @abstractmethod
    def _arguments(self, host: str, port: str) -> list[str]: ...

    @abstractmethod
    def _variables(self) -> Mapping[str, str]: ...

    def job_command(self) -> str:
        """Return a command with `{host}` and `{port}`, which a job of Slurm fills in.

        Raises:
            EngineStartError: The engine is not installed.
        """
        variables = [f"{name}={value}" for name, value in self._environment().items()]
        return shlex.join(["env", *variables, self._python(), *self._arguments("{host}", "{port}")])

    def _server_command(self, folder: Path) -> ServerCommand:
        port, setpriv = free_port(), shutil.which("setpriv")
        command = [
            *([setpriv, "--pdeathsig", self.death_signal, "--"] if setpriv else []),
            *(self._python(), *self._arguments("127.0.0.1", str(port))),
        ]
        environment = self._environment() | {"HOME": str(folder)}  # it writes caches
        return ServerCommand(command, environment, lambda: port)

    def _python(self) -> str:
        python = self._env_dir / "bin" / "python"
        if not python.exists():
            raise EngineStartError(f"{self.engine} is not installed in {self._env_dir}; run {self.installer}")
        return str(python)

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": f"{self._env_dir / 'bin'}:{os.environ.get('PATH', os.defpath)}",
            "OMP_NUM_THREADS": str(_THREADS),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            **self._variables(),
        }


DEFAULT_ENVIRONMENT = CHECKOUT / ".venv-sglang"
_STAND_INS = CHECKOUT / "deploy" / "sglang-cpu"


class SGLangCpuServer(CpuServer):
    """For tests and the demo."""

    engine = "SGLang"
    installer = "scripts/install-sglang"
    default_env_dir = DEFAULT_ENVIRONMENT
    env_variable = "ROLLOUT_SGLANG_ENV"
    death_signal = "KILL"  # its workers watch the server themselves
    start_seconds = 420.0  # a minute on an idle machine

    def __init__(
        self,
        model_path: Path | str,
        *,
        env_dir: Path | None = None,
        kv_tokens: int = 20_000,
        routed_experts: bool = False,
    ) -> None:
        """With `routed_experts` the server can report which experts read each token."""
        super().__init__(model_path, env_dir=env_dir)
        self._kv_tokens = kv_tokens
        self._routed_experts = routed_experts

    def _server_command(self, folder: Path) -> ServerCommand:
        if not _STAND_INS.is_dir():
            raise EngineStartError("SGLang on a CPU needs a checkout of this project: use scripts/demo there")
        return super()._server_command(folder)

    def _arguments(self, host: str, port: str) -> list[str]:
        return [
            *("-m", "sglang.launch_server"),
            *("--model-path", str(self._model_path), "--host", host, "--port", port),
            *("--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule"),
            *("--dtype", "float32", "--tp", "1", "--mem-fraction-static", "0.5"),
            *("--max-total-tokens", str(self._kv_tokens), "--max-running-requests", str(MAX_RUNNING)),
            *("--enable-metrics", "--sleep-on-idle"),  # else an idle server keeps a core busy
            *(["--enable-return-routed-experts"] if self._routed_experts else []),
            "--incremental-streaming-output",
        ]

    def _variables(self) -> Mapping[str, str]:
        return {
            "PYTHONPATH": str(_STAND_INS),
            "SGLANG_USE_CPU_ENGINE": "1",
            # SGLang keeps experts in memory that a GPU can write to, which has to be simulated here.
            **({"SGLANG_CPU_LOCKS_NO_PAGES": "1"} if self._routed_experts else {}),
            "TORCHDYNAMO_DISABLE": "1",
        }
