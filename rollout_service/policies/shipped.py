"""Tiny policies that ship with the service, for demos and tests; `training/` is how they were made.

`calc-tuned` solves the environment `calc` almost always, `calc-base` about every second time, so that its
groups are worth training on. Both are Qwen3 models of under a million parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rollout_service.errors import ConfigurationError

POLICIES: Final = ("calc-base", "calc-tuned")


def policy_folder(name: str) -> Path:
    """The folder of a shipped policy, as an engine loads it; raises ConfigurationError for an unknown one."""
    if name not in POLICIES:
        raise ConfigurationError(
            f"there is no policy {name!r}", hint=f"The shipped ones are {', '.join(POLICIES)}."
        )
    return Path(__file__).parent / "checkpoints" / name
