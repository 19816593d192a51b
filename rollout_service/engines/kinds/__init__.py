"""Engine protocols: SGLang, vLLM, and the embedded engine."""
