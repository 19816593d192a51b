"""A small inference engine for a CPU, in numpy, that speaks SGLang's HTTP protocol.

For the demo, laptops and fast tests: Qwen3 in float32, with continuous batching and a prefix cache, without torch.
`python -m rollout_service.engines.kinds.embedded --help` starts it.
"""
