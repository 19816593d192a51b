"""A prompt that is much longer than the context is refused before it is rendered, and one that may fit never is."""

from dataclasses import replace

import pytest

from rollout_service.engines.shipped import policy_folder
from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.contract import ClientMessage, ClientToolCall, Dialect, ModelCall
from rollout_service.gateway.errors import ContextOverflowError
from rollout_service.tokens import ChatRenderer
from tests.support.samples import generation

CONTEXT = 4_096
LONG = "ab 1\n" * 400_000
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": LONG, "parameters": {"type": "object", "properties": {}}},
}


class CountingRenderer(ChatRenderer):
    """Counts the characters that are encoded, whoever encodes them."""

    encoded = 0

    def encode(self, text: str) -> list[int]:
        CountingRenderer.encoded += len(text)
        return super().encode(text)

    def render(self, messages, tools=()):  # type: ignore[no-untyped-def]
        CountingRenderer.encoded += sum(len(message.content) for message in messages)
        return super().render(messages, tools)


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return CountingRenderer.load(policy_folder("calc-base"))


def call(*messages: ClientMessage, **fields: object) -> ModelCall:
    made = ModelCall(dialect=Dialect.CHAT, model="policy", messages=messages)
    return replace(made, **fields)  # type: ignore[arg-type]


USER = ClientMessage("user", "hi")
CALL = ClientToolCall("c", "f", f'{{"text": "{LONG}"}}'.replace("\n", " "))
TOO_LONG = {
    "a user's message": call(ClientMessage("user", LONG)),
    "a system message": call(ClientMessage("system", LONG), USER),
    "many messages": call(*[ClientMessage("user", LONG[:500])] * 4_000),
    "a tool's result": call(
        USER,
        ClientMessage("assistant", "", calls=(replace(CALL, arguments="{}"),)),
        ClientMessage("tool", LONG),
    ),
    "tools": call(USER, tools=(TOOL,)),
    "an answer": call(USER, ClientMessage("assistant", LONG), USER),
    "a thought": call(USER, ClientMessage("assistant", "", LONG), USER),
    "a call": call(USER, ClientMessage("assistant", calls=(CALL,)), ClientMessage("tool", "x", call_id="c")),
    "the id of a call": call(USER, ClientMessage("assistant", calls=(replace(CALL, id=LONG, arguments="{}"),)), USER),
    "the id of a result": call(USER, ClientMessage("tool", "x", call_id=LONG)),
    "the name of a result": call(USER, ClientMessage("tool", "x", tool_name=LONG)),
    "a signature": call(USER, ClientMessage("assistant", "x", turn_key=LONG), USER),
    "white space": call(ClientMessage("user", "x" + " " * len(LONG))),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_prompt_that_is_much_longer_than_the_context_is_not_rendered(renderer, name):
    CountingRenderer.encoded = 0
    with pytest.raises(ContextOverflowError) as told:
        TurnCapture(renderer).plan(TOO_LONG[name], CONTEXT)
    assert CountingRenderer.encoded <= 32 * CONTEXT
    assert told.value.prompt_tokens > 4 * CONTEXT


@pytest.mark.slow
def test_the_estimate_is_near_what_rendering_tells(renderer):
    long = call(ClientMessage("user", LONG[: 50 * CONTEXT]))
    with pytest.raises(ContextOverflowError) as told:
        TurnCapture(renderer).plan(long, CONTEXT)
    exact = len(TurnCapture(renderer).plan(long).prompt_ids)
    assert told.value.prompt_tokens == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize(
    "message",
    [
        ClientMessage("user", LONG[:CONTEXT]),
        ClientMessage("user", "x" + "\n" * 16 * CONTEXT),
        ClientMessage("assistant", "x", "thought " * CONTEXT),
    ],
)
def test_a_prompt_that_may_fit_is_rendered(renderer, message):
    planned = TurnCapture(renderer).plan(call(USER, message, USER), CONTEXT)
    assert len(planned.prompt_ids) == len(TurnCapture(renderer).plan(call(USER, message, USER)).prompt_ids)


def test_only_what_a_call_adds_to_a_turn_is_compared_with_what_the_context_has_left(renderer):
    capture = TurnCapture(renderer)
    tool = {"type": "function", "function": {**TOOL["function"], "description": LONG[: 8 * CONTEXT]}}  # type: ignore[dict-item]
    first = call(ClientMessage("user", LONG[: CONTEXT // 2]), tools=(tool,))
    planned = capture.plan(first)
    known = len(planned.prompt_ids)
    ids = [*renderer.encode("Yes."), renderer.stop_token_ids[0]]
    capture.record(planned, generation(ids), delivered=True)
    echo = ClientMessage("assistant", planned.splitter.sent.text)
    more = replace(first, messages=(*first.messages, echo, USER))
    assert capture.plan(more, known + CONTEXT).known == known + len(ids)
    longer = replace(first, messages=(*first.messages, echo, ClientMessage("user", LONG)))
    with pytest.raises(ContextOverflowError) as told:
        capture.plan(longer, known + CONTEXT)
    assert told.value.prompt_tokens > known + 4 * CONTEXT


def test_no_answer_in_a_known_history_is_longer_than_the_context(renderer):
    capture = TurnCapture(renderer)
    planned = capture.plan(call(USER))
    ids = [*renderer.encode("Yes."), renderer.stop_token_ids[0]]
    capture.record(planned, generation(ids), delivered=True)
    for thought in ("hm", LONG):
        echo = ClientMessage("assistant", planned.splitter.sent.text, thought)
        again = call(USER, echo, USER)
        assert capture.plan(again).known, "a changed thought does not end a segment"
        if thought == LONG:
            with pytest.raises(ContextOverflowError):
                capture.plan(again, CONTEXT)


def test_a_turn_keeps_of_a_schema_only_that_there_is_one(renderer):
    asked = call(USER, json_schema={"enum": [LONG]}, answer_format={"schema": {"enum": [LONG]}})
    kept = TurnCapture(renderer).plan(asked).call
    assert (kept.json_schema, kept.answer_format) == ({}, None)
