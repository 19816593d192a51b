"""Inference engines: the contract, the SGLang backend, pools of backends, and a small engine for a CPU."""
