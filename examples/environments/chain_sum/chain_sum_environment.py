r"""`chain-sum`: one kind of task of reasoning-gym in a form that the tiny policy can use, with a Python tool.

Guarantees: the tasks are the library's own, the reward is what its scorer gives the answer, in a fresh sandbox, and no
question is in both splits. Only the form differs from the environment `reasoning-gym`: no system prompt, a tool, and
the answer in `\boxed{}`, which is all that the tiny policy has learned to write.

The folder is a plug-in, as that of `arithmetic` is. `rollout-service env install reasoning-gym` installs the library.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Final

from pydantic import JsonValue

from rollout_service.environments import ConfigurationError, EpisodeLimits, SandboxSettings
from rollout_service.environments.bridges.reasoning_gym import generate
from rollout_service.environments.bridges.reasoning_gym.environment import SPEC, ReasoningGym
from rollout_service.environments.builtin.math.environment import last_boxed

TASK: Final = "chain_sum"
CONFIG: Final = {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 4}
"""Sums and differences that the policy's training had the likes of, in words that it had not."""
SPLITS: Final = {"held_out": (7_020_261, 128), "train": (20_261, 2_048)}
"""The seed and the size of each; far apart, since instance i of seed s is instance 0 of seed s + i."""


class ChainSum(ReasoningGym):
    """`reasoning-gym` with its data set replaced by sums."""

    def dataset(self) -> list[dict[str, JsonValue]]:
        """Return the instances, which the library makes in the first call.

        Raises:
            ConfigurationError: The library is not installed, or fails.
        """
        return [dict(one) for one in _tasks()]


@cache
def _tasks() -> list[dict[str, JsonValue]]:
    found: dict[str, dict[str, JsonValue]] = {}
    for split, (seed, size) in SPLITS.items():
        for instance in _make(seed, size):
            found.setdefault(str(instance["question"]), {**instance, "split": split})
    return list(found.values())


def _make(seed: int, size: int) -> list[dict[str, JsonValue]]:
    """Return what the bridge's own program makes. A process of its own also works where an event loop runs."""
    generate.REASONING_GYM.python()
    options = ["--seed", str(seed), "--size", str(size), "--config", json.dumps(CONFIG)]
    command = [sys.executable, "-m", generate.__name__, TASK, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=generate.GENERATE_SECONDS)
    if done.returncode != 0:
        raise ConfigurationError(f"reasoning-gym made no tasks: {done.stderr.strip()[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


chain_sum = ChainSum(
    spec=SPEC.model_copy(
        update={
            "name": "chain-sum",
            "description": r"Sums of reasoning-gym with a Python tool; the answer is in \boxed{}.",
            "system": None,
            "tools": ["python"],
            "limits": EpisodeLimits(max_turns=4, max_tokens=1_024, max_turn_tokens=96, tool_seconds=60.0),
            "sandbox": SandboxSettings(memory="512M", max_processes=64),
            "grader_sandbox": SPEC.sandbox,
        }
    ),
    read_answer=last_boxed,
)
