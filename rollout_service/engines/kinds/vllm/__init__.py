"""The vLLM backend."""
