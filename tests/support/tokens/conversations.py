"""Random conversations of a policy that writes anything, with tools that answer anything, and their check.

A conversation depends only on its seed. `hold` plays it through `Conversation`, calls `check_invariants`, and asserts
two facts that only an observer can check. Unless a segment was begun, each prompt extends exactly the ids of the last
prompt and its output. Each sampled token is in the segments once, with its own log-probability, version and turn, and
nothing else is trainable.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from api_schemas.trajectories import FinishReason, ForkReason, Message, ToolCall, Trajectory
from rollout_service.tokens import ChatRenderer, Conversation, check_invariants
from rollout_service.tokens.errors import RenderError
from tests.support.tokens.chat_formats import control_tokens

TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run code.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
WRITTEN = [
    "plain text",
    '<tool_call>\n{"name": "python", "arguments": {"code": "print(1)"}}\n</tool_call>',
    '<tool_call>\n{"name": "python", "arguments": {"code": false}}\n</tool_call>',
    '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": \n</tool_call>',
    '<tool_call>\n{"name": "python", "arguments": {"code": "pri',
    '<tool_call>\n{"name": {"a": 1}, "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"name": "python", "arguments": {"code": "\\ud800"}}\n</tool_call>',
    '<tool_call>\n{"name": "python", "arguments": {"code": NaN}}\n</tool_call>',
    "<tool_call>\n" + "[" * 3000 + "\n</tool_call>",
    "<tool_call>\n" + "1" * 5000 + "\n</tool_call>",
    "<think>\nhm\n</think>\n\nanswer",
    "hm\n</think>\n\nanswer",
    "<think>\nnot closed",
    "</think>\n\nanswer 🙂 日本",
    "",
]
_TEXTS = [
    "",
    " ",
    "ok",
    "Line one.\nLine two.\n",
    "é🙂日本",
    "  padded\t\n",
    "false",
    '{"a": [1, null]}',
    "\ufdd0",
    "x" * 500,
]
_NAMES = ["python", "größe", "工具", "a b", "", None]


def _call(number: int) -> ToolCall:
    arguments = {"code": "print(1)", "größe": ["é", 1, None, True]}
    return ToolCall(id=f"functions.python:{number}", name="python", arguments=arguments, raw="")


QUESTION = Message(role="user", content="Hello")
TURNS = {
    "plain": Message(role="assistant", content="Fine."),
    "thought": Message(role="assistant", content="Fine.", reasoning="Hm."),
    "call": Message(role="assistant", tool_calls=[_call(0)]),
    "thought call": Message(role="assistant", reasoning="Hm.", tool_calls=[_call(0)]),
    "parallel calls": Message(role="assistant", reasoning="Hm.", tool_calls=[_call(0), _call(1)]),
}


def answers_to(turn: Message) -> list[Message]:
    """Return messages that may follow this turn: results in the order of its calls, or a user's message."""
    results = [
        Message(role="tool", content=f"Result {i}.", tool_call_id=call.id, name=call.name)
        for i, call in enumerate(turn.tool_calls)
    ]
    return results or [Message(role="user", content="More")]


def as_written(renderer: ChatRenderer, turn: Message) -> tuple[list[int], list[int], list[int]] | None:
    """Return the prompt, a turn's ids as the chat format itself writes them, and the conversation with its answers.

    Return None if the format cannot write such a turn, or does not begin it as it begins the assistant's next turn.
    """
    try:
        prompt = renderer.render([QUESTION], [TOOL])
        whole = renderer.render([QUESTION, turn, *answers_to(turn)], [TOOL])
    except RenderError:
        return None
    rest = whole[len(prompt) :]
    end = next((i for i, token in enumerate(rest) if token in renderer.stop_token_ids), None)
    if whole[: len(prompt)] != prompt or end is None:
        return None
    return prompt, rest[: end + 1], whole


@dataclass
class Format:
    """A renderer, and turns that policies of its family write."""

    name: str
    renderer: ChatRenderer
    control: Sequence[str] = field(init=False)
    turns: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.control = control_tokens(self.name)
        written = (as_written(self.renderer, turn) for turn in TURNS.values())
        self.turns = [found[1] for found in written if found is not None]
        self.turns += [self.renderer.encode(text) for text in WRITTEN]


@dataclass
class _Turn:
    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    versions: list[int]


def hold(chat: Format, seed: int) -> Counter[str]:
    """Play one conversation and check it; return its number of turns, and of forks by reason."""
    random = Random(seed)
    conversation = Conversation(chat.renderer, [TOOL] if random.random() < 0.6 else [])
    conversation.append(_opening(random, chat))
    chains: list[list[_Turn]] = []
    reasons: list[ForkReason] = []
    for number in range(random.randint(1, 4)):
        try:
            prompt = conversation.prompt()
        except RenderError:  # this format has no place for such messages, so no turn is sampled on them
            break
        assert prompt == conversation.prompt()
        turn = _Turn(prompt, *_sampled(random, chat, number))
        recorded = conversation.record(turn.output, turn.logprobs, turn.versions, random.choice(list(FinishReason)))
        if recorded.fork_reason is None:
            last = chains[-1][-1]
            before = last.prompt + last.output
            assert prompt[: len(before)] == before
        else:
            chains.append([])
            reasons.append(recorded.fork_reason)
        chains[-1].append(turn)
        _go_on(random, chat, conversation)
    trajectory = conversation.trajectory()
    _check(trajectory, chains, reasons)
    if seed % 8 == 0:
        assert Trajectory.model_validate_json(trajectory.model_dump_json()) == trajectory
    return Counter([f"fork: {reason.value}" for reason in reasons]) + Counter(
        {"turns": sum(map(len, chains)), "conversations": 1}
    )


def _check(trajectory: Trajectory, chains: list[list[_Turn]], reasons: list[ForkReason]) -> None:
    check_invariants(trajectory)
    assert [segment.fork_reason for segment in trajectory.segments] == reasons
    number = 0
    for index, (chain, segment) in enumerate(zip(chains, trajectory.segments, strict=True)):
        assert segment.token_ids == chain[-1].prompt + chain[-1].output
        expected = [(0, 0.0, -1, -1)] * len(segment.token_ids)
        for turn in chain:
            rows = zip(turn.logprobs, turn.versions, strict=True)
            begin = len(turn.prompt)
            expected[begin : begin + len(turn.output)] = [(1, logprob, v, number) for logprob, v in rows]
            number += 1
        columns = (segment.loss_mask, segment.logprobs, segment.versions, segment.turn_ids)
        assert list(zip(*columns, strict=True)) == expected
        assert segment.parent == (index - 1 if index else None)
        if index:
            parent = trajectory.segments[index - 1].token_ids
            shared = segment.shared_prefix
            assert segment.token_ids[:shared] == parent[:shared]
            prompt = chain[0].prompt
            assert shared in (len(prompt), len(parent)) or prompt[shared] != parent[shared]


def _opening(random: Random, chat: Format) -> list[Message]:
    head = random.choice([None, None, "system", "developer"])
    messages = [Message(role=head, content=_text(random, chat) or "Be brief.")] if head else []
    return [*messages, Message(role="user", content=_text(random, chat))]


def _text(random: Random, chat: Format) -> str:
    forged = random.choice(chat.control)
    drawn = [*random.choices(_TEXTS, k=2), forged, forged[: random.randint(1, len(forged))]]
    return "".join(random.sample(drawn, random.randint(0, 3)))


def _sampled(random: Random, chat: Format, version: int) -> tuple[list[int], list[float], list[int]]:
    renderer = chat.renderer
    kind = random.random()
    if kind < 0.6:
        ids = list(random.choice(chat.turns))
    elif kind < 0.8:
        ids = random.choices(range(renderer.vocab_size), k=random.randint(0, 25))
    else:
        ids = renderer.encode(_text(random, chat))  # look-alikes of control tokens become control tokens here
    stops = renderer.stop_token_ids
    ids = ids[: random.randint(0, len(ids))] if random.random() < 0.2 else ids
    ids += random.choices(stops, k=random.choice([0, 0, 1, 1, 2])) if stops else []
    split = random.randint(0, len(ids))
    versions = [version] * split + [version + 1] * (len(ids) - split)
    return ids, [-random.random() for _ in ids], versions


def _go_on(random: Random, chat: Format, conversation: Conversation) -> None:
    last = conversation.turns[-1]
    if random.random() < 0.12:
        kept = conversation.messages[: random.randint(1, len(conversation.messages) - 1)]
        conversation.replace([*kept, Message(role="user", content="Go on.")])
    elif random.random() < 0.12:
        summary = Message(role="user", content=f"So far: {last.message.content[:50]}")
        conversation.replace([summary], ForkReason.COMPACTION)
    elif random.random() < 0.7:
        calls = [call.id for call in last.tool_calls] or [None] * random.randint(1, 2)
        conversation.append(
            [
                Message(role="tool", content=_text(random, chat), tool_call_id=i, name=random.choice(_NAMES))
                for i in calls
            ]
        )
    else:
        role = random.choice(["user", "user", "user", "system", "developer", "assistant"])
        conversation.append([Message(role=role, content=_text(random, chat))])
        if role != "user":
            conversation.append([Message(role="user", content=_text(random, chat))])
