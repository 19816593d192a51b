"""Renders a trajectory for people: prompts, completions, and how sure the policy was of each token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from api_schemas.rollouts import Rollout
from api_schemas.trajectories import Segment, Trajectory
from api_schemas.views.summaries import RolloutSummary
from rollout_service.base.errors import format_failure
from rollout_service.cli.console import Heading
from rollout_service.tokens.tokenizer import ChatTokenizer

CONTEXT = "dim"
SAMPLED = "green"
UNSURE = "bold yellow"
UNSURE_BELOW = -0.7
"""Natural logarithm; below it, a token was less likely than not."""


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of one turn, or of the context."""

    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    turn: int
    """-1 for context, which has mask 0."""
    version: int

    @property
    def sampled(self) -> bool:
        return self.turn >= 0


def split_by_turn(segment: Segment) -> Iterator[TokenSpan]:
    for turn, indices in groupby(range(len(segment.token_ids)), key=segment.turn_ids.__getitem__):
        whole = list(indices)
        span = slice(whole[0], whole[-1] + 1)
        yield TokenSpan(
            start=span.start,
            token_ids=segment.token_ids[span],
            logprobs=segment.logprobs[span],
            turn=turn,
            version=segment.versions[span.start],
        )


def render_rollout(rollout: Rollout, tokenizer: ChatTokenizer, *, scripted: bool = False) -> RenderableType:
    """Render a rollout with its trajectory; log-probabilities of a scripted model, which are made up, are left out."""
    head = render_head(rollout)
    if rollout.trajectory is None:
        return head
    return Group(head, render_trajectory(rollout.trajectory, tokenizer, scripted=scripted))


def render_head(rollout: Rollout) -> RenderableType:
    parts_of_it = ", ".join(f"{name} {value:g}" for name, value in rollout.reward_parts.items())
    head = f"rollout {rollout.rollout_id}: {rollout.state}, {rollout.stop_reason}, reward {_reward(rollout.reward)}"
    head += f" ({parts_of_it})" if parts_of_it else ""
    parts: list[RenderableType] = [Heading(head)]
    if (branch := rollout.branch_of) is not None:
        parts.append(Text(f"a branch of {branch.rollout_id} at turn {branch.turn}"))
    parts += [Text(note, style="yellow") for note in rollout.notes]
    if rollout.error is not None:
        parts.append(Text(format_failure(rollout.error), style="red"))
    return Group(*parts)


def render_branches(rollout_id: str, group: Sequence[RolloutSummary]) -> RenderableType:
    found = [(row.branch_of.turn, row) for row in group if row.branch_of and row.branch_of.rollout_id == rollout_id]
    found.sort(key=lambda each: each[0])
    return Group(
        *(
            Text(f"branched at turn {turn}: {row.rollout_id}, {row.state}, reward {_reward(row.reward)}")
            for turn, row in found
        )
    )


def render_trajectory(trajectory: Trajectory, tokenizer: ChatTokenizer, *, scripted: bool = False) -> RenderableType:
    """Render every token: context dim, sampled tokens green, with log-probabilities unless `scripted`."""
    parts: list[RenderableType] = []
    for number, segment in enumerate((*trajectory.segments, *trajectory.untrained)):
        counts = f"{len(segment.token_ids)} tokens, {sum(segment.loss_mask)} sampled"
        kind = "" if number < len(trajectory.segments) else f", {segment.role}, not trained"
        parts.append(Text(f"segment {number} ({segment.fork_reason}{kind}): {counts}", style="bold"))
        parts.extend(_render_span(span, tokenizer, scripted) for span in split_by_turn(segment))
    return Group(*parts)


def _reward(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"


def _render_span(span: TokenSpan, tokenizer: ChatTokenizer, scripted: bool) -> RenderableType:
    end = span.start + len(span.token_ids)
    kind = f"turn {span.turn}, version {span.version}, mask 1" if span.sampled else "context, mask 0"
    head = Text(f"tokens {span.start}-{end - 1}: {kind}", style="cyan")
    text = tokenizer.decode(list(span.token_ids))
    body = [Text(text.strip("\n"), style=SAMPLED if span.sampled else CONTEXT)]
    if span.sampled and not scripted:
        body.append(_logprobs(span, tokenizer))
    return Group(head, Padding(Group(*body), (0, 0, 0, 2), expand=False))


def _logprobs(span: TokenSpan, tokenizer: ChatTokenizer) -> Text:
    line = Text("logprobs: ", style=CONTEXT)
    for token_id, logprob in zip(span.token_ids, span.logprobs, strict=True):
        token = tokenizer.decode([token_id]).replace("\n", "\\n")
        line.append(token, style=SAMPLED)
        line.append(f" {logprob:.3f}  ", style=UNSURE if logprob < UNSURE_BELOW else CONTEXT)
    return line
