"""A small inference engine for a CPU, in numpy, that speaks SGLang's HTTP protocol.

For the demo, laptops and fast tests: it runs the Qwen3 architecture in float32, with continuous batching and a
prefix cache, and needs no torch. `python -m rollout_service.engines.kinds.embedded --help` starts it.
"""
