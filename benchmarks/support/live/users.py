"""Users of live sessions: each holds a conversation, and notes of each answer what it must have been.

Guarantee: a request that did not end with a whole answer is counted as lost, whatever went wrong.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

_DATA = b"data: "
_DONE = b"[DONE]"


@dataclass(slots=True)
class Clock:
    """The versions of the weights, as whoever loads them knows them."""

    loaded: int = 0
    """The newest version that every engine has."""
    ordered: int = 0
    """The newest version that any engine may have."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as its user got it."""

    text: str
    oldest: int
    """No token of it is of an older version."""
    newest: int
    seconds: float
    first_seconds: float
    """Until the first text."""


@dataclass(slots=True)
class User:
    session_id: str
    base_url: str
    """Ends with the version."""
    headers: Mapping[str, str]
    clock: Clock
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    requests: int = 0
    problems: list[str] = field(default_factory=list)
    """Why requests were lost."""

    @property
    def lost(self) -> int:
        """Return how many requests were not answered."""
        return self.requests - len(self.answers)

    def answer(self, turn: int, text: str) -> Answer | None:
        """Return the answer of a turn if it was read; after a lost one, turns are known by their text alone."""
        possible = self.answers if self.lost else self.answers[turn : turn + 1]
        return next((one for one in possible if one.text.strip() == text), None)

    async def ask(self, http: aiohttp.ClientSession) -> None:
        self.messages.append({"role": "user", "content": f"Question {self.requests} of {self.session_id}."})
        self.requests += 1
        answer = await self._ask(http)
        if answer is not None:
            self.answers.append(answer)
            self.messages.append({"role": "assistant", "content": answer.text})

    async def abandon(self, http: aiohttp.ClientSession, *, at_once: bool) -> None:
        """Ask, and never come back; if `at_once`, not even for the answer."""
        if not at_once:
            await self.ask(http)
            return
        self.messages.append({"role": "user", "content": "Question 0"})
        async with http.post(self._url, data=self._body(), headers=self.headers) as response:
            await response.content.readany()

    @property
    def _url(self) -> str:
        return f"{self.base_url}/chat/completions"

    def _body(self) -> bytes:
        return orjson.dumps({"model": "policy", "messages": self.messages, "stream": True, "max_tokens": 256})

    async def _ask(self, http: aiohttp.ClientSession) -> Answer | None:
        oldest, started = self.clock.loaded, time.perf_counter()
        try:
            async with http.post(self._url, data=self._body(), headers=self.headers) as response:
                text, first = await _read(response)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            after = time.perf_counter() - started
            self.problems.append(f"{self.session_id}, request {self.requests}, after {after:.1f} s: {error!r}")
            return None
        ended = time.perf_counter()
        return Answer(text, oldest, self.clock.ordered, ended - started, first - started)


async def _read(response: aiohttp.ClientResponse) -> tuple[str, float]:
    """Return the text of a stream, and when its first piece came.

    Raises:
        ValueError: It is not whole.
    """
    if response.status != 200:
        raise ValueError(f"{response.status} {(await response.text())[:500]}")
    text, first, is_whole = "", None, False
    async for line in response.content:
        data = line.strip().removeprefix(_DATA)
        if not line.startswith(_DATA):
            continue
        if data == _DONE:
            if first is None or not is_whole:
                break
            return text, first
        answer = orjson.loads(data)
        for choice in answer.get("choices", ()):
            if piece := choice["delta"].get("content"):
                first = first or time.perf_counter()
                text += piece
            is_whole = is_whole or choice.get("finish_reason") == "stop"
        if "error" in answer:
            raise ValueError(str(answer["error"]))
    raise ValueError(f"the stream ended after {text[:200]!r}")
