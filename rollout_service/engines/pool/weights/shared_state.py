"""The state that a command leaves in a pool, as the services that share the pool's engines pass it on.

Guarantee: a pool that takes it over has the same pause, weights and process groups as the pool that carried the command
out, and gives no request to a backend that the command left without the weights.
"""

from __future__ import annotations

from pydantic import BaseModel

from api_schemas.inference import PauseMode, Weights


class PoolState(BaseModel):
    """The pause, the weights and the process groups of a pool."""

    pause: PauseMode | None = None
    source: Weights | None = None
    """Where the weights came from; None before the first update."""
    version: int = 0
    """The version of the weights, if there is a source."""
    kept_kv: list[int] = []
    """The versions that were loaded while KV of older weights stayed in use."""
    unknown: list[str] = []
    """The backends whose weights are not known for certain."""
    groups: dict[str, list[str]] = {}
    """The backends of each process group."""
    versions: dict[str, int] = {}
    """The version of each backend in service."""
    out: list[str] = []
    """The backends that the last command took out of service."""
