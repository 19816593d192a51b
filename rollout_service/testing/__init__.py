"""Stand-ins for engines and models, for tests and benchmarks: scripted engines and random checkpoints."""

from rollout_service.testing.checkpoint import Shape, write_random_checkpoint
from rollout_service.testing.faults import AfterTokens, Fault
from rollout_service.testing.hardware import Hardware
from rollout_service.testing.script import Counting, Replies, Reply, Script
from rollout_service.testing.sglang_engine import ScriptedEngine
from rollout_service.testing.vllm_engine import ScriptedVllm

__all__ = [
    "AfterTokens",
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
