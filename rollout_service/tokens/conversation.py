"""A conversation in token ids: prompts out, sampled ids in. Pure and synchronous.

Inside a segment, prompt k+1 starts with exactly the ids of prompt k and output k. Sampled ids are never derived from
text, and each is trainable in exactly one segment. Whatever breaks the chain begins a new segment with a counted
reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from api_schemas.trajectories import FinishReason, ForkReason, Message, ToolCall, Trajectory
from rollout_service.tokens.errors import ConversationStateError, RecordError
from rollout_service.tokens.renderer import ChatRenderer, ParsedTurn, ToolSpec
from rollout_service.tokens.trajectory import GrowingSegment, TurnExtras, shared_length


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    turn_id: int
    prompt_length: int
    output_ids: tuple[int, ...]
    finish_reason: FinishReason
    fork_reason: ForkReason | None
    """None when it extends one."""
    message: Message
    """Derived from the ids, for tools and for people."""

    @property
    def tool_calls(self) -> list[ToolCall]:
        """Includes malformed ones."""
        return self.message.tool_calls

    @property
    def truncated(self) -> bool:
        """Whether a token limit cut the turn off."""
        return self.finish_reason is FinishReason.LENGTH


class Conversation:
    def __init__(self, renderer: ChatRenderer, tools: Sequence[ToolSpec] = ()) -> None:
        self._renderer = renderer
        self._tools = list(tools)
        self._messages: list[Message] = []
        self._turns: list[AssistantTurn] = []
        self._segments: list[GrowingSegment] = []
        self._fork: ForkReason | None = ForkReason.FIRST
        self._refused = False
        """Whether the chat format has refused to extend the sampled ids."""
        self._answered = 0  # messages that the last turn's prompt and the turn itself cover
        self._last: tuple[list[int], list[int]] | None = None
        """Prompt and output, until the next prompt is made."""
        self._pending: tuple[list[int], ForkReason | None] | None = None

    def offer(self, tools: Sequence[ToolSpec]) -> None:
        if self._turns:
            raise ConversationStateError("tools cannot change after the first turn")
        self._tools = list(tools)
        self._pending = None

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def turns(self) -> tuple[AssistantTurn, ...]:
        return tuple(self._turns)

    @property
    def fork_counts(self) -> dict[ForkReason, int]:
        return dict(Counter(segment.fork_reason for segment in self._segments))

    @property
    def rendered_next(self) -> tuple[Message, ...]:
        """The messages that the next `prompt()` may have to render: at least the new ones.

        It is all of them when a segment begins, once the chat format has refused to extend a sampled turn, and in
        formats that prove each extension on the whole conversation.
        """
        whole = self._refused or self._fork is not None or self._renderer.rereads_history
        return tuple(self._messages if whole else self._messages[self._answered :])

    def append(self, messages: Sequence[Message]) -> None:
        self._messages += [self._with_tool_name(message) for message in messages]
        self._pending = None

    def replace(self, messages: Sequence[Message], reason: ForkReason = ForkReason.HISTORY_EDITED) -> None:
        """Replace the whole history; the next prompt begins a new segment.

        Tokens sampled before stay in their own segments and are trainable only there. In the new segment they are
        context, rendered from these messages. The new segment names the last one as its parent.
        """
        self._messages = list(messages)
        self._pending = None
        if self._segments:
            self._fork = reason

    def prompt(self) -> list[int]:
        """Return the ids to send to the engine; they stay the same until messages are added or the turn is recorded.

        Raises:
            ConversationStateError: There is no message to answer.
            RenderError: The chat format has no place for these messages.
        """
        if self._pending is None:
            self._pending = self._next_prompt()
        return list(self._pending[0])

    def count_if_over(self, context_length: int) -> int | None:
        """Estimate the tokens of `prompt()` if these are surely more than the context holds; else return None."""
        is_whole = len(self.rendered_next) == len(self._messages)
        known = 0 if is_whole else len(self._segments[-1].token_ids)
        texts = [message.content for message in self.rendered_next if message.role != "assistant"]
        tokens = self._renderer.count_if_over(texts, max(context_length - known, 1))
        return None if tokens is None else known + tokens

    def decode(self, ids: Sequence[int]) -> str:
        return self._renderer.decode(ids)

    def recorded_length(self) -> int:
        """Count the tokens of `prompt()` that its segment has already; 0 if it begins one."""
        return len(self._segments[-1].token_ids) if self._extends else 0

    def next_segment(self) -> int:
        """Return the number of the segment that `prompt()` extends or begins, from 0."""
        return len(self._segments) - 1 if self._extends else len(self._segments)

    def routed_length(self) -> int:
        """Count the tokens of `prompt()` for which its segment already has experts."""
        return self._segments[-1].extras.routed if self._extends else 0

    @property
    def _extends(self) -> bool:
        return self._pending is not None and self._pending[1] is None

    def record(
        self,
        output_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        finish_reason: FinishReason,
        extras: TurnExtras | None = None,
    ) -> AssistantTurn:
        """Record the engine's answer to `prompt()`.

        The three lists have one entry per sampled token. `extras` starts at `recorded_length()` for log-probabilities
        of the prompt, and at `routed_length()` for experts.

        Raises:
            ConversationStateError: No prompt was asked for.
            RecordError: Log-probabilities, versions or extras are missing or not usable.
        """
        if self._pending is None:
            raise ConversationStateError("there is no prompt to answer", hint="Call prompt() first.")
        check_output(output_ids, logprobs, versions)
        prompt, fork_reason = self._pending
        output = list(output_ids)
        turn_id = len(self._turns)
        is_new = fork_reason is not None
        segment = self._new_segment(fork_reason, prompt) if fork_reason is not None else self._segments[-1]
        if extras is not None:
            sizes = {"before": len(segment.token_ids), "prompt": len(prompt), "sampled": len(output)}
            segment.extras.add_turn(extras, **sizes)
        if is_new:
            self._segments.append(segment)
            self._refused = self._refused or fork_reason is ForkReason.BRIDGE_REFUSED
        segment.add_context(prompt[len(segment.token_ids) :])
        segment.add_sampled(output, logprobs, versions, turn_id)
        turn = AssistantTurn(
            turn_id=turn_id,
            prompt_length=len(prompt),
            output_ids=tuple(output),
            finish_reason=finish_reason,
            fork_reason=fork_reason,
            message=as_message(self._renderer.parse(output, prompt, self._tools, f"call-{turn_id}")),
        )
        self._turns.append(turn)
        self._messages.append(turn.message)
        self._answered = len(self._messages)
        self._last, self._pending, self._fork = (prompt, output), None, None
        return turn

    def trajectory(self) -> Trajectory:
        """Return all segments so far. Messages after the last turn are in none, because nothing was sampled on them."""
        return Trajectory.model_construct(
            segments=[segment.freeze() for segment in self._segments],
            messages=list(self._messages),
            finish_reasons=[turn.finish_reason for turn in self._turns],
            fork_counts=self.fork_counts,
        )

    def _new_segment(self, reason: ForkReason, prompt: Sequence[int]) -> GrowingSegment:
        if not self._segments:
            return GrowingSegment(reason)
        # Both segments hold the shared ids as context, or the parent sampled them and the new one reads them.
        parent = len(self._segments) - 1
        return GrowingSegment(reason, parent, shared_length(self._segments[parent].token_ids, prompt))

    def _next_prompt(self) -> tuple[list[int], ForkReason | None]:
        if self._fork is not None:
            return self._rendered(self._fork)
        new = self._messages[self._answered :]
        if not new:
            raise ConversationStateError(
                "the last turn has no answer yet", hint="Append a tool result or a message first."
            )
        last, self._last = self._last or self._last_turn(), None
        bridged = self._renderer.bridge(*last, new, self._tools, history=self._messages[: self._answered])
        return self._rendered(ForkReason.BRIDGE_REFUSED) if bridged is None else (bridged, None)

    def _last_turn(self) -> tuple[list[int], list[int]]:
        ids, output = self._segments[-1].token_ids.tolist(), self._turns[-1].output_ids
        return ids[: len(ids) - len(output)], list(output)

    def _rendered(self, reason: ForkReason) -> tuple[list[int], ForkReason]:
        if not self._messages:
            raise ConversationStateError("there is no message to answer", hint="Append the task first.")
        return self._renderer.render(self._messages, self._tools), reason

    def _with_tool_name(self, message: Message) -> Message:
        """Name the tool that answers, since some formats print it; a bridge sees only the new messages."""
        if message.role != "tool" or message.name or not self._turns:
            return message
        names: Mapping[str, str | None] = {call.id: call.name for call in self._turns[-1].tool_calls}
        return message.model_copy(update={"name": names.get(message.tool_call_id or "")})


_LARGEST_ID, _LARGEST_VERSION = 2**31 - 1, 2**63 - 1


_TURN = Message(role="assistant", content="", reasoning=None, tool_calls=[], tool_call_id=None, name=None)


def as_message(parsed: ParsedTurn) -> Message:
    """Make a message unchecked, by a copy, which takes a third of the time of `model_construct`."""
    said = {"content": parsed.content, "reasoning": parsed.reasoning, "tool_calls": list(parsed.tool_calls)}
    return _TURN.model_copy(update=said)


def check_output(ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
    """Check that an engine's answer can be trained on.

    Raises:
        RecordError: The lists differ in length, or hold numbers that a segment cannot.
    """
    if not len(ids) == len(logprobs) == len(versions):
        raise RecordError(
            f"{len(ids)} sampled ids came with {len(logprobs)} log-probabilities and {len(versions)} versions",
            hint="Ask the engine for the log-probability of every sampled token.",
        )
    if min(ids, default=0) < 0 or min(versions, default=0) < 0:
        raise RecordError("a sampled id or a version is negative", hint="Check the engine's answer.")
    if max(ids, default=0) > _LARGEST_ID or max(versions, default=0) > _LARGEST_VERSION:
        raise RecordError("a sampled id or a version is too large", hint="Check the engine's answer.")
    if not all(map(isfinite, logprobs)):
        raise RecordError("a log-probability is not a finite number", hint="Look for NaN in the engine's weights.")
