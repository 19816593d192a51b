"""Stand-ins for engines and models, and whole episodes without them, for tests and benchmarks."""

from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import OtherModels, Trial, play
from rollout_service.testing.checkpoint import Shape, write_random_checkpoint
from rollout_service.testing.engine_turn import AfterTokens, Fault
from rollout_service.testing.hardware import Hardware
from rollout_service.testing.script import Counting, Replies, Reply, Script
from rollout_service.testing.scripted_policy import ScriptedPolicy, call, turn
from rollout_service.testing.sglang_engine import ScriptedEngine
from rollout_service.testing.vllm_engine import ScriptedVllm

__all__ = [
    "AfterTokens",
    "Counting",
    "Fault",
    "Hardware",
    "OtherModels",
    "Replies",
    "Reply",
    "SandboxSource",
    "Script",
    "ScriptedEngine",
    "ScriptedPolicy",
    "ScriptedVllm",
    "Shape",
    "Trial",
    "call",
    "play",
    "turn",
    "write_random_checkpoint",
]
