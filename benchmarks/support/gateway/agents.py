"""Agents that call a chat API and time its answers: each holds its conversation, and sends all of it every time.

A call is timed from before its request is sent until its answer was read; making its body is not part of it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anyio
import orjson

MAX_TOKENS = 512
SYSTEM_CHARACTERS = 4_000
TOOLS = 6
_WORDS = ("alpha", "value", "print", "return", "count", "index", "total", "of", "the", "in", "is", "42", "7")
_DATA = b"data: "
_DONE = b"[DONE]"


def filler(characters: int, seed: int) -> str:
    """Return words and numbers of about this length."""
    draw = random.Random(seed)
    words = draw.choices(_WORDS, k=characters // 4)
    return " ".join(words)[:characters]


def _tool(number: int) -> dict[str, Any]:
    name = "bash" if number == 0 else f"tool_{number}"
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    function = {"name": name, "description": filler(400, number), "parameters": parameters}
    return {"type": "function", "function": function}


_HEAD = {"model": "policy", "max_tokens": MAX_TOKENS, "tools": [_tool(number) for number in range(TOOLS)]}
_SYSTEM = {"role": "system", "content": filler(SYSTEM_CHARACTERS, 0)}


@dataclass(slots=True)
class Timings:
    whole: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    """Until the first text or call of a streamed answer."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where an agent finds its model."""

    base_url: str
    """Ends with the version."""
    key: str


@dataclass(slots=True)
class Agent:
    access: Access
    number: int
    output_characters: int
    """The length of a tool's output."""
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages += [_SYSTEM, {"role": "user", "content": f"Task {self.number}: read all parts."}]

    def body(self, *, stream: bool) -> bytes:
        return orjson.dumps(_HEAD | {"messages": self.messages, "stream": stream})

    def keep(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        for call in message["tool_calls"]:
            output = filler(self.output_characters, len(self.messages) * 1_000 + self.number)
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})


async def take_turn(http: aiohttp.ClientSession, agent: Agent, timings: Timings, *, stream: bool = False) -> None:
    body = agent.body(stream=stream)
    headers = {"Authorization": f"Bearer {agent.access.key}", "Content-Type": "application/json"}
    started = time.perf_counter()
    async with http.post(f"{agent.access.base_url}/chat/completions", data=body, headers=headers) as answer:
        if answer.status != 200:
            raise RuntimeError(f"the model answered {answer.status}: {(await answer.text())[:500]}")
        message = await (_read_stream(answer, started, timings) if stream else _read(answer))
    timings.whole.append(time.perf_counter() - started)
    agent.keep(message)


async def _read(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    message = orjson.loads(await answer.read())["choices"][0]["message"]
    return {name: message[name] for name in ("role", "content", "tool_calls")}


async def _read_stream(answer: aiohttp.ClientResponse, started: float, timings: Timings) -> dict[str, Any]:
    """Read a stream of one call at most."""
    text, call = "", {"id": "", "name": "", "arguments": ""}
    seen = False
    async for line in answer.content:
        data = line.strip().removeprefix(_DATA)
        if not line.startswith(_DATA) or data == _DONE:
            continue
        delta = next((choice["delta"] for choice in orjson.loads(data)["choices"]), {})
        if not seen and (delta.get("content") or delta.get("tool_calls")):
            seen = True
            timings.first.append(time.perf_counter() - started)
        text += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            call["id"] += part.get("id") or ""
            call["name"] += part["function"].get("name") or ""
            call["arguments"] += part["function"].get("arguments") or ""
    function = {"name": call["name"], "arguments": call["arguments"]}
    calls = [{"id": call["id"], "type": "function", "function": function}] if call["id"] else []
    return {"role": "assistant", "content": text, "tool_calls": calls}


async def time_generate(url: str, ids: Sequence[int], count: int) -> list[float]:
    """Time calls of the engine's own `/generate`, whose bodies are ready, one after the other."""
    request = {"rid": "unrecorded-1", "input_ids": ids, "return_logprob": True}
    body = orjson.dumps(request | {"sampling_params": {"max_new_tokens": MAX_TOKENS}})
    taken = []
    async with aiohttp.ClientSession() as http:
        for _ in range(count):
            started = time.perf_counter()
            async with http.post(f"{url}/generate", data=body) as answer:
                await answer.read()
            taken.append(time.perf_counter() - started)
    return taken


async def converse(
    agents: Sequence[Agent], turns: int, *, spread_seconds: float = 0.0, stream: bool = False
) -> Timings:
    """Let agents take `turns` turns each, all at once but for their starts, which are spread over some time."""
    timings = Timings()

    async def work(http: aiohttp.ClientSession, agent: Agent, place: int) -> None:
        await anyio.sleep(place * spread_seconds / len(agents))
        for _ in range(turns):
            await take_turn(http, agent, timings, stream=stream)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http, anyio.create_task_group() as group:
        for place, agent in enumerate(agents):
            group.start_soon(work, http, agent, place)
    return timings
