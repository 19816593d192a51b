"""The former path of `rollout_client.adapters.areal`."""

from typing import Any

from rollout_client.adapters import areal
from rollout_client.adapters.areal import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(areal, name)
