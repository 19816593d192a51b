"""The counts of a rollout's capture, for metrics and for its owner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from api_schemas.trajectories import ForkReason, SegmentRole
from rollout_service.gateway.capture.echoes import EchoMatch


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """The counts of one rollout so far."""

    calls: int
    """The recorded turns."""
    continued: int
    """Those whose prompt extends a recorded turn."""
    prompt_tokens: int
    """The tokens of all prompts."""
    kept_tokens: int
    """Those of them that were a recorded turn's prompt and output, so that nothing was rendered again."""
    standings: Mapping[EchoMatch, int]
    """How answers stood when they came back, each form of each answer counted once."""
    forks: Mapping[ForkReason, int]
    """The number of segments by the reason why they began."""
    roles: Mapping[SegmentRole, int]
    """The number of turns by whose conversation they are in."""
    malformed_calls: int
    undelivered: int
    """Answers that their client did not receive."""
    disagreements: int
    """Answers of which the client was sent something else than the parser found; each is a defect."""

    @property
    def kept_share(self) -> float | None:
        """The share of prompt tokens that stayed in segments, 0 to 1; None before the first call."""
        return self.kept_tokens / self.prompt_tokens if self.prompt_tokens else None
