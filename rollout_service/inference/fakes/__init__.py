"""Stand-ins for engines and models, for tests and benchmarks: a scripted engine, a random checkpoint."""

from rollout_service.inference.fakes.checkpoint import Shape, write_random_checkpoint
from rollout_service.inference.fakes.engine import Fault, ScriptedEngine
from rollout_service.inference.fakes.hardware import Hardware
from rollout_service.inference.fakes.script import Counting, Replies, Reply, Script
from rollout_service.inference.fakes.vllm import ScriptedVllm

__all__ = [
    "Counting",
    "Fault",
    "Hardware",
    "Replies",
    "Reply",
    "Script",
    "ScriptedEngine",
    "ScriptedVllm",
    "Shape",
    "write_random_checkpoint",
]
