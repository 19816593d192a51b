"""Stand-ins for engines and models, for tests and benchmarks: a scripted engine, a random checkpoint."""

from rollout_service.inference.fakes.checkpoint import Shape, write_random_checkpoint
from rollout_service.inference.fakes.engine import Fault, ScriptedEngine
from rollout_service.inference.fakes.script import Counting, Replies, Reply, Script

__all__ = [
    "Counting",
    "Fault",
    "Replies",
    "Reply",
    "Script",
    "ScriptedEngine",
    "Shape",
    "write_random_checkpoint",
]
