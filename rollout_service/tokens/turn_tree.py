"""The turns of one rollout as a tree, in token ids: conversations that share beginnings. Pure and synchronous.

Unlike in a `Conversation`, a turn may be continued several times, by parallel calls, retries and agents that an agent
starts. The prompt of a turn that extends another starts with exactly the ids of that turn's prompt and output, and only
the new messages are rendered. In the trajectory each sampled token is in one segment, with mask 1 there; other segments
that contain it hold it as context.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from api_schemas.trajectories import FinishReason, ForkReason, Message, Segment, SegmentRole, Trajectory
from rollout_service.tokens.conversation import as_message, check_output
from rollout_service.tokens.renderer import ChatRenderer, ParsedTurn, ToolSpec
from rollout_service.tokens.trajectory import GrowingSegment, TurnExtras, shared_length


@dataclass(slots=True, eq=False)
class TreeTurn:
    """`role` and `trained` may be changed at any time, since the purpose of a turn may show only later."""

    turn_id: int
    parent: TreeTurn | None
    after: TreeTurn | None
    """The turn that it follows in meaning, without extending its prompt; None if `parent` says it."""
    reason: ForkReason
    """The reason if it begins a segment."""
    role: SegmentRole
    trained: bool
    prompt_length: int
    end: int
    """Tokens of prompt and output together."""
    logprobs: array[float]
    versions: array[int]
    finish_reason: FinishReason
    extras: TurnExtras | None
    message: Message
    """Derived from the ids, for tools and for people."""
    _lane: array[int]
    """Prompt and output, perhaps followed by the ids of the first turn that extends this one."""

    def ids(self) -> list[int]:
        return self._lane[: self.end].tolist()

    @property
    def output_ids(self) -> list[int]:
        return self._lane[self.prompt_length : self.end].tolist()

    @property
    def lineage(self) -> TreeTurn | None:
        return self.parent or self.after


@dataclass(frozen=True, slots=True, eq=False)
class TreePrompt:
    ids: array[int]
    """An array, since a list of a long prompt would make an object of every id, for every turn."""
    tools: Sequence[ToolSpec]
    parent: TreeTurn | None
    after: TreeTurn | None
    reason: ForkReason

    @property
    def known(self) -> int:
        """Ids that are the parent's, with its output."""
        return self.parent.end if self.parent is not None else 0

    @property
    def routed(self) -> int:
        """Ids for which the turns before have experts; a turn may have none."""
        turn = self.parent
        while turn is not None and (turn.extras is None or turn.extras.routed_experts is None):
            turn = turn.parent
        return 0 if turn is None else turn.end - 1


@dataclass(slots=True)
class TurnTree:
    _renderer: ChatRenderer
    _turns: list[TreeTurn] = field(default_factory=list)
    _next_id: int = 0

    @property
    def next_id(self) -> int:
        return self._next_id

    def skip(self) -> None:
        """Use up an id for a turn of which nothing is kept; its finish reason is `abort`."""
        self._next_id += 1

    @property
    def turns(self) -> tuple[TreeTurn, ...]:
        return tuple(self._turns)

    def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        reason: ForkReason = ForkReason.NEW_ROOT,
        after: TreeTurn | None = None,
    ) -> TreePrompt:
        return TreePrompt(array("i", self._renderer.render(messages, tools)), tools, None, after, reason)

    def extend(
        self,
        turn: TreeTurn,
        new: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        history: Sequence[Message] = (),
        reason: ForkReason = ForkReason.BRANCH,
    ) -> TreePrompt | None:
        """Return None if the extension cannot be proven.

        `history` is as for `ChatRenderer.bridge`. `reason` is why the new turn begins a segment if another one extends
        the same turn already.
        """
        prompt = turn._lane[: turn.prompt_length]
        after = self._renderer.bridge_after(prompt, turn.output_ids, new, tools, history)
        if after is None:
            return None
        ids = turn._lane[: turn.end]
        ids.extend(after)
        return TreePrompt(ids, tools, turn, None, reason)

    def record(
        self,
        prompt: TreePrompt,
        output_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        finish_reason: FinishReason,
        extras: TurnExtras | None = None,
        *,
        role: SegmentRole = SegmentRole.MAIN,
        trained: bool = True,
        parsed: ParsedTurn | None = None,
    ) -> TreeTurn:
        """Record the engine's answer to a prompt; the three lists have one entry per sampled token.

        `parsed` is the renderer's parse of the answer, if it is known; its calls need ids that no other turn has.
        `extras` starts at `prompt.known` for log-probabilities of the prompt, and at `prompt.routed` for experts.

        Raises:
            RecordError: Log-probabilities, versions or extras are missing or not usable.
        """
        check_output(output_ids, logprobs, versions)
        turn_id = self._next_id
        if parsed is None:
            parsed = self._renderer.parse(output_ids, prompt.ids, prompt.tools, f"call-{turn_id}")
        turn = TreeTurn(
            turn_id=turn_id,
            parent=prompt.parent,
            after=prompt.after,
            reason=prompt.reason,
            role=role,
            trained=trained,
            prompt_length=len(prompt.ids),
            end=len(prompt.ids) + len(output_ids),
            logprobs=array("d", logprobs),
            versions=array("q", versions),
            finish_reason=finish_reason,
            extras=extras,
            message=as_message(parsed),
            _lane=_lane(prompt, output_ids),
        )
        if extras is not None:  # before the turn is kept: extras that do not fit raise an error
            _grown([turn])
        self._turns.append(turn)
        self._next_id += 1
        return turn

    def fork_counts(self) -> dict[ForkReason, int]:
        """Count the segments so far by the reason why they began."""
        chains = _chains(self._turns)
        return dict(Counter(_reason(chain[0], number) for number, chain in enumerate(chains)))

    def trajectory(self, messages: Sequence[Message] = ()) -> Trajectory:
        """Return all segments so far.

        The first turn that extends another one, has its role, and is trained as it is, is in the same segment. Any
        other begins a segment.
        """
        chains = _chains(self._turns)
        place = {turn.turn_id: number for number, chain in enumerate(chains) for turn in chain}
        segments = [_segment(chain, number, chains, place) for number, chain in enumerate(chains)]
        trained = sum([chain[0].trained for chain in chains])
        reasons = {turn.turn_id: turn.finish_reason for turn in self._turns}
        return Trajectory.model_construct(
            segments=segments[:trained],
            messages=list(messages),
            finish_reasons=[reasons.get(number, FinishReason.ABORT) for number in range(self._next_id)],
            fork_counts=dict(Counter(segment.fork_reason for segment in segments)),
            untrained=segments[trained:],
        )


def _lane(prompt: TreePrompt, output: Sequence[int]) -> array[int]:
    """Join prompt and output, in the parent's memory if no other turn has extended it."""
    parent = prompt.parent
    if parent is None or len(parent._lane) != parent.end:
        lane = prompt.ids[:]
        lane.extend(output)
        return lane
    parent._lane.extend(prompt.ids[parent.end :])
    parent._lane.extend(output)
    return parent._lane


def _chains(turns: Sequence[TreeTurn]) -> list[list[TreeTurn]]:
    """Put the turns into segments; those to train on come first."""
    chains: list[list[TreeTurn]] = []
    ends: dict[int, list[TreeTurn]] = {}  # the chain that ends with a turn
    for turn in turns:
        parent = turn.parent
        chain = ends.pop(parent.turn_id, None) if parent is not None and _alike(parent, turn) else None
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(turn)
        ends[turn.turn_id] = chain
    return sorted(chains, key=lambda chain: not chain[0].trained)


def _alike(one: TreeTurn, other: TreeTurn) -> bool:
    return one.role is other.role and one.trained == other.trained


def _reason(first: TreeTurn, number: int) -> ForkReason:
    return ForkReason.FIRST if number == 0 and first.trained else first.reason


def _segment(
    chain: Sequence[TreeTurn], number: int, chains: Sequence[Sequence[TreeTurn]], place: dict[int, int]
) -> Segment:
    grown = _grown(chain)
    first = chain[0]
    grown.role = first.role
    grown.fork_reason = _reason(first, number)
    before = first.lineage
    while before is not None and first.trained and not before.trained:
        before = before.lineage
    if before is not None:
        grown.parent = place[before.turn_id]
        last = chains[grown.parent][-1]
        shared = shared_length(last._lane[: last.end], grown.token_ids)
        # What this segment sampled is not shared, even if the parent sampled the same.
        grown.shared_prefix = min(shared, first.prompt_length)
    return grown.freeze()


def _grown(chain: Sequence[TreeTurn]) -> GrowingSegment:
    """Join the ids of all turns up to the last, with mask 1 on those that the chain sampled."""
    first, last = chain[0], chain[-1]
    segment = GrowingSegment(first.reason)
    _add_ancestors(segment, first)
    for turn in chain:
        if turn.extras is not None:
            sizes = {"before": len(segment.token_ids), "prompt": turn.prompt_length}
            segment.extras.add_turn(turn.extras, **sizes, sampled=turn.end - turn.prompt_length)
        segment.add_context(last._lane[len(segment.token_ids) : turn.prompt_length])
        output = last._lane[turn.prompt_length : turn.end]
        segment.add_sampled(output, turn.logprobs, turn.versions, turn.turn_id)
    return segment


def _add_ancestors(segment: GrowingSegment, turn: TreeTurn) -> None:
    """Add the tokens of the turns before a branch, as context with their extras."""
    ancestors: list[TreeTurn] = []
    while turn.parent is not None:
        turn = turn.parent
        ancestors.append(turn)
    for ancestor in reversed(ancestors):
        segment.extras.add_context(ancestor.extras, before=len(segment.token_ids), end=ancestor.end)
        segment.add_context(ancestor._lane[len(segment.token_ids) : ancestor.end])
