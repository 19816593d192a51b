"""No request may ask for more than its bounds, whatever its API; it is told so by name, and nothing is sampled."""

from typing import Any

import pytest

from rollout_service.gateway.bounds import MAX_NAME_CHARS, MAX_SCHEMA_BYTES, MAX_STOP_CHARS
from rollout_service.gateway.contract import Dialect
from tests.support.gateway.asgi import COUNTS, PATHS, gateway_bench

USER = {"role": "user", "content": "hi"}
PARTS = {"role": "user", "parts": [{"text": "hi"}]}
BODIES: dict[Dialect, dict[str, Any]] = {
    Dialect.CHAT: {"messages": [USER]},
    Dialect.RESPONSES: {"input": [USER]},
    Dialect.ANTHROPIC: {"messages": [USER]},
    Dialect.GOOGLE: {"contents": [PARTS]},
}
SMALL = {"max_answers": 2, "max_messages": 4, "max_tools": 3, "max_stops": 2}
LARGE_SCHEMA = {"type": "object", "description": "x" * MAX_SCHEMA_BYTES}
LONG_STOP = "x" * (MAX_STOP_CHARS + 1)


def google(**config: Any) -> dict[str, Any]:
    return {"generationConfig": config}


def calls(count: int) -> list[dict[str, Any]]:
    return [{"id": f"{n}", "function": {"name": "f", "arguments": "{}"}} for n in range(count)]


TOO_MUCH: list[tuple[Dialect, str, dict[str, Any]]] = [
    (Dialect.CHAT, "n", {"n": 3}),
    (Dialect.CHAT, "n", {"n": 2**40}),
    (Dialect.CHAT, "messages", {"messages": [USER] * 5}),
    (Dialect.CHAT, "messages", {"messages": [USER, {"role": "assistant", "tool_calls": calls(3)}]}),
    (Dialect.CHAT, "tools", {"tools": [{"function": {"name": f"f{n}"}} for n in range(4)]}),
    (Dialect.CHAT, "stop", {"stop": ["a", "b", "c"]}),
    (Dialect.CHAT, "stop.0", {"stop": [""]}),
    (Dialect.CHAT, "stop.0", {"stop": ""}),
    (Dialect.CHAT, "stop.1", {"stop": ["a", LONG_STOP]}),
    (Dialect.CHAT, "model", {"model": "m" * (MAX_NAME_CHARS + 1)}),
    (
        Dialect.CHAT,
        "response_format",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": LARGE_SCHEMA}}},
    ),
    (Dialect.RESPONSES, "input", {"input": [USER] * 5}),
    (Dialect.RESPONSES, "tools", {"tools": [{"type": "function", "name": f"f{n}"} for n in range(4)]}),
    (Dialect.RESPONSES, "text.format", {"text": {"format": {"type": "json_schema", "schema": LARGE_SCHEMA}}}),
    (Dialect.ANTHROPIC, "messages", {"messages": [USER] * 5}),
    (
        Dialect.ANTHROPIC,
        "tools",
        {"tools": [{"name": f"f{n}", "input_schema": {}, "defer_loading": n > 1} for n in range(4)]},
    ),
    (Dialect.ANTHROPIC, "stop_sequences", {"stop_sequences": ["a", "b", "c"]}),
    (Dialect.ANTHROPIC, "stop_sequences.1", {"stop_sequences": ["a", ""]}),
    (Dialect.ANTHROPIC, "output_format", {"output_format": {"type": "json_schema", "schema": LARGE_SCHEMA}}),
    (Dialect.GOOGLE, "generationConfig.candidateCount", google(candidateCount=3)),
    (Dialect.GOOGLE, "contents", {"contents": [PARTS] * 5}),
    (Dialect.GOOGLE, "tools", {"tools": [{"functionDeclarations": [{"name": f"f{n}"} for n in range(4)]}]}),
    (Dialect.GOOGLE, "generationConfig.stopSequences", google(stopSequences=["a", "b", "c"])),
    (Dialect.GOOGLE, "generationConfig.stopSequences.0", google(stopSequences=[""])),
    (Dialect.GOOGLE, "generationConfig.responseSchema", google(responseSchema=LARGE_SCHEMA)),
]


@pytest.mark.parametrize(("dialect", "path", "more"), TOO_MUCH)
async def test_more_than_a_bound_is_refused_by_name(renderer, dialect, path, more):
    async with gateway_bench(renderer, **SMALL) as b:
        for route in filter(None, [PATHS[dialect], COUNTS.get(dialect)]):
            answer = await b.post(route, BODIES[dialect] | more)
            assert answer.status_code == 400, answer.text
            assert path in named_fields(dialect, answer.json()["error"])
        assert not b.engine.requests
        assert (await b.post(PATHS[dialect], BODIES[dialect])).status_code == 200, "the session goes on"


def named_fields(dialect: Dialect, error: dict[str, Any]) -> str:
    """Return the fields that an error names, where clients of its API look for them."""
    match dialect:
        case Dialect.ANTHROPIC:
            return str(error["message"]).partition(": ")[0]
        case Dialect.GOOGLE:
            return str([each["field"] for each in error["details"][0]["fieldViolations"]])
        case _:
            return str(error["param"])


async def test_as_much_as_the_bounds_allow_is_answered(renderer):
    async with gateway_bench(renderer, **SMALL) as b:
        tools = [{"function": {"name": f"f{n}"}} for n in range(3)]
        body = {"messages": [USER] * 4, "tools": tools, "stop": ["a", "x" * MAX_STOP_CHARS], "n": 2}
        answer = (await b.post(PATHS[Dialect.CHAT], body)).json()
        assert len(answer["choices"]) == 2
        body = {"contents": [PARTS], **google(candidateCount=2, stopSequences=["a", "b"])}
        assert len((await b.post(PATHS[Dialect.GOOGLE], body)).json()["candidates"]) == 2
        assert b.session.usage.turns == 4


NOTHING: dict[Dialect, dict[str, Any]] = {
    Dialect.RESPONSES: {"input": [{"type": "of_another_service"}]},
    Dialect.ANTHROPIC: {"messages": [{"role": "user", "content": []}]},
    Dialect.GOOGLE: {"contents": [{"parts": []}]},
}
"""Messages of which nothing is left that a chat format has a place for."""


@pytest.mark.parametrize("dialect", NOTHING)
async def test_messages_that_cannot_be_rendered_are_the_programs_fault(renderer, dialect):
    async with gateway_bench(renderer) as b:
        for path in (PATHS[dialect], COUNTS[dialect]):
            answer = await b.post(path, NOTHING[dialect])
            assert answer.status_code == 400, answer.text
            assert "cannot render" in answer.json()["error"]["message"]
