"""Tiny policies that ship with the service, for demos and tests: Qwen3 models of under a million parameters.

They were made with `training/`. `calc-tuned` solves the environment `calc` almost always; `calc-base` about every
second time, which makes its groups worth training on. `parl-base` is an orchestrator for `pointers` and `split` that
mostly does everything itself, and its own sub-agent. `live-base` answers a live session's short questions, with endings
by chance.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rollout_service.base.errors import ConfigurationError

POLICIES: Final = ("calc-base", "calc-tuned", "live-base", "parl-base")


def model_folder(model: str) -> Path:
    """Return the folder of a shipped policy, or of any other model."""
    return policy_folder(model) if model in POLICIES else Path(model).expanduser()


def policy_folder(name: str) -> Path:
    """Return the folder of a shipped policy, as an engine loads it.

    Raises:
        ConfigurationError: There is no such policy.
    """
    if name not in POLICIES:
        raise ConfigurationError(f"there is no policy {name!r}", hint=f"The shipped ones are {', '.join(POLICIES)}.")
    return Path(__file__).parent / "checkpoints" / name
