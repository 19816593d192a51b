"""What capture makes of the recorded conversations of real agents: how much of each prompt stays in its segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common import Figures

from rollout_service.engines.shipped import policy_folder
from rollout_service.tokens import ChatRenderer
from tests.support.gateway.recordings import NAMES
from tests.support.gateway.replaying import replay

RUNS = (
    "aider",
    "claude",
    "claude-2.1.330",
    "cline",
    "codex",
    "gemini",
    "mini",
    "openai-agents",
    "opencode",
    "opencode-anthropic",
    "opencode-google",
    "openhands",
    "pi",
    "pi-responses",
    "qwen",
    "smolagents",
)
"""The recordings of a plain run of a few turns; in the others, something was provoked, such as a compaction."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """One recorded conversation; every count is over all its calls, side calls and sub-agents included."""

    calls: int
    segments: int
    continuing_prompt_tokens: int
    """The prompt tokens of all calls but the first, which has nothing to continue."""
    kept_tokens: int
    """Those of them that were a recorded turn's prompt and output."""

    @property
    def kept_share(self) -> float | None:
        """The share of the prompt tokens that were kept; None for a single call."""
        return self.kept_tokens / self.continuing_prompt_tokens if self.continuing_prompt_tokens else None


def replay_all() -> Mapping[str, Replayed]:
    """Replay every recording, in Qwen3's format."""
    renderer = ChatRenderer.load(policy_folder("calc-tuned"), "qwen3")
    return {name: _replayed(renderer, name) for name in NAMES}


def _replayed(renderer: ChatRenderer, name: str) -> Replayed:
    capture, answered = replay(renderer, name)
    plans = [each.planned for each in answered]
    return Replayed(
        calls=len(plans),
        segments=sum(capture.report().forks.values()),
        continuing_prompt_tokens=sum([len(plan.prompt_ids) for plan in plans[1:]]),
        kept_tokens=sum([plan.known for plan in plans[1:]]),
    )


def replay_figures(replayed: Mapping[str, Replayed]) -> Figures:
    """Return the figures of the plain runs together, and of all recordings."""
    return _figures([replayed[name] for name in RUNS], "") | _figures(list(replayed.values()), "_all")


def _figures(recordings: Sequence[Replayed], suffix: str) -> Figures:
    kept = sum([each.kept_tokens for each in recordings])
    calls, segments = sum([each.calls for each in recordings]), sum([each.segments for each in recordings])
    return {
        f"bridged_share{suffix}": kept / sum([each.continuing_prompt_tokens for each in recordings]),
        f"merge_factor{suffix}": calls / segments,
        f"recorded_calls{suffix}": calls,
        f"recorded_segments{suffix}": segments,
    }
