"""Trace ids that can be computed from rollout ids, so that anyone who knows a rollout finds its trace without a search.

Guarantee: a rollout whose caller sent no trace has the same trace id in every attempt, on every node.
"""

from __future__ import annotations

import hashlib

from opentelemetry.sdk.trace.id_generator import RandomIdGenerator


def trace_id_of(rollout_id: str) -> int:
    """Return the trace id of a rollout whose caller sent none: half of the SHA-256 of its id."""
    return int.from_bytes(hashlib.sha256(rollout_id.encode()).digest()[:16])


class RolloutIds(RandomIdGenerator):
    """Random ids, except for the trace id of a rollout.

    A span is started without waiting for anything, so what is set just before is used for no other.
    """

    def __init__(self) -> None:
        self.next_trace: int | None = None
        """The id of the next trace that is begun without a parent."""

    def generate_trace_id(self) -> int:
        """Return the id that was set, once, or else a random one."""
        chosen, self.next_trace = self.next_trace, None
        return super().generate_trace_id() if chosen is None else chosen
