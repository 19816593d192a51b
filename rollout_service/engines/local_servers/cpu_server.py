"""A real engine on a CPU, run by the Python of its own environment, which a script of this project installs.

Guarantees: nothing is downloaded; the kernel ends the server when this process is killed, so no server outlives it.
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
"""The checkout of this project, in which the scripts install the engines."""
MAX_RUNNING = 32
"""The most requests that a server samples at once; the others wait in its queue."""
_THREADS = 1


class CpuServer(ServerProcess):
    """Serves the model in `model_path`, in float32, at `url` while the context lasts.

    Raises:
        EngineStartError: The engine is not installed or does not start; raised on entering.
    """

    engine: ClassVar[str]
    """The engine's name in messages."""
    installer: ClassVar[str]
    """The script that installs it."""
    default_env_dir: ClassVar[Path]
    """Where the script installs it."""
    env_variable: ClassVar[str]
    """The environment variable that names another folder."""
    death_signal: ClassVar[str]
    """The signal that the kernel sends the server when this process ends; its workers must end too."""

    def __init__(self, model_path: Path | str, *, env_dir: Path | None = None) -> None:
        """`env_dir` is where the engine is installed; by default, `env_variable` or `default_env_dir` names it."""
        super().__init__()
        self._model_path = Path(model_path).resolve()
        self._env_dir = env_dir or Path(os.environ.get(self.env_variable, self.default_env_dir))

    @abstractmethod
    def _arguments(self, host: str, port: str) -> list[str]:
        """Return the arguments of Python that start the server at an address."""

    @abstractmethod
    def _variables(self) -> Mapping[str, str]:
        """Return the environment variables that only this engine needs."""

    def job_command(self) -> str:
        """Return a command that serves in the foreground at `{host}` and `{port}`, which a job of Slurm fills in.

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
