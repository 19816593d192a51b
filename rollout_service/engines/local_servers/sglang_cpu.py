"""The real SGLang on a CPU, for tests and the demo; `scripts/install-sglang` installs it in a separate environment."""

from collections.abc import Mapping
from pathlib import Path

from rollout_service.engines.local_servers.cpu_server import CHECKOUT, MAX_RUNNING, CpuServer
from rollout_service.engines.local_servers.process import EngineStartError, ServerCommand

DEFAULT_ENVIRONMENT = CHECKOUT / ".venv-sglang"
_STAND_INS = CHECKOUT / "deploy" / "sglang-cpu"


class SGLangCpuServer(CpuServer):
    """An SGLang server; see `CpuServer`."""

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
        incremental: bool = True,
    ) -> None:
        """With `routed_experts` the server can report which experts read each token.

        With `incremental` it streams each token once; SGLang's own default is all tokens so far in every chunk.
        """
        super().__init__(model_path, env_dir=env_dir)
        self._kv_tokens = kv_tokens
        self._routed_experts = routed_experts
        self._is_incremental = incremental

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
            *(["--incremental-streaming-output"] if self._is_incremental else []),
        ]

    def _variables(self) -> Mapping[str, str]:
        return {
            "PYTHONPATH": str(_STAND_INS),
            "SGLANG_USE_CPU_ENGINE": "1",
            # SGLang keeps experts in memory that a GPU can write to, which has to be simulated here.
            **({"SGLANG_CPU_LOCKS_NO_PAGES": "1"} if self._routed_experts else {}),
            "TORCHDYNAMO_DISABLE": "1",
        }
