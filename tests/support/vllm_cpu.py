"""The real vLLM on a CPU, for tests; `scripts/install-vllm` installs it in a separate environment."""

from collections.abc import Mapping

from rollout_service.engines.local_servers.cpu_server import CHECKOUT, MAX_RUNNING, CpuServer

DEFAULT_ENVIRONMENT = CHECKOUT / ".venv-vllm"
CACHE_BLOCK = 32
"""Tokens per block of its prefix cache: the fewest that its CPU attention accepts."""
_KV_GIGABYTES = 1


class VllmCpuServer(CpuServer):
    """A vLLM server; see `CpuServer`."""

    engine = "vLLM"
    installer = "scripts/install-vllm"
    default_env_dir = DEFAULT_ENVIRONMENT
    env_variable = "ROLLOUT_VLLM_ENV"
    death_signal = "TERM"  # lets it end its workers first
    start_seconds = 420.0

    def _arguments(self, host: str, port: str) -> list[str]:
        return [
            # The command `vllm` looks for a distribution of that name, which the CPU build lacks.
            *("-W", "ignore", "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self._model_path), "--host", host, "--port", port),
            *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", str(MAX_RUNNING)),
            *("--block-size", str(CACHE_BLOCK), "--logprobs-mode", "processed_logprobs"),
            *("--enable-scale-out", "--enable-prompt-tokens-details"),
        ]

    def _variables(self) -> Mapping[str, str]:
        return {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIGABYTES),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
        }
