"""A scripted engine that records the times of each turn, to time the service from outside.

A turn is asked for when the last bytes of its request have arrived in this process, and answered when the response has
been handed to the socket. The time that the engine itself takes to parse requests and write responses is not counted as
the service's.

Run: python benchmarks/engine.py --delay SECONDS --address FILE --record FILE [--host ADDRESS] [--port PORT]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import anyio
from aiohttp import web
from tokenizers import Tokenizer

from rollout_service.engines.shipped import policy_folder
from rollout_service.testing.engine_turn import EngineTurn
from rollout_service.testing.script import Replies, Reply
from rollout_service.testing.serving import serve
from rollout_service.testing.sglang_engine import ScriptedEngine

MODEL = policy_folder("calc-tuned")
COMMAND = "echo hello"
KEPT_TOKENS = 256
"""How many tokens of a prompt are recorded: enough to hold the number in the first message."""
NEW_TOKENS = 64
"""About how many tokens of a prompt are new to a real engine, which has the turns before in its cache."""
TIMES = struct.Struct("=2d4s")
"""When the engine was asked and when it answered, and the IPv4 address of who asked."""
PROMPTS = struct.Struct(f"=i{KEPT_TOKENS}i")
"""The length of a prompt and its beginning."""
RECORD = struct.Struct(TIMES.format + PROMPTS.format.removeprefix("="))


PROMPT: ContextVar[bytes] = ContextVar("prompt")
"""The prompt that the current asyncio task answers, as `PROMPTS`."""


class OneTurn:
    """A script that repeats one turn forever, and keeps what identifies the prompt."""

    def __init__(self, command: str = COMMAND) -> None:
        """Each turn calls bash with this command."""
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        self._replies = Replies.from_texts([f"<tool_call>\n{call}\n</tool_call><|im_end|>"], MODEL)

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        begin = input_ids[:KEPT_TOKENS]
        padding = [0] * (KEPT_TOKENS - len(begin))
        PROMPT.set(PROMPTS.pack(len(input_ids), *begin, *padding))
        return self._replies.reply(input_ids, budget)


class TimedConnection(web.RequestHandler):
    """A connection that records when data arrived last."""

    arrived = 0.0

    def data_received(self, data: bytes) -> None:
        self.arrived = time.monotonic()
        super().data_received(data)


class TimedServer(web.Server):
    """A server that makes such connections."""

    def __call__(self) -> TimedConnection:
        return TimedConnection(self, loop=self._loop, **self._kwargs)


class TimedEngine(ScriptedEngine):
    """An engine that appends a record of each turn to a file."""

    def __init__(
        self,
        record: Path,
        *,
        latency: float,
        command: str = COMMAND,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__(OneTurn(command), latency=latency, model_path=MODEL, host=host, port=port)
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def _take_time(self, turn: EngineTurn) -> None:
        turn.cached_tokens = max(0, turn.prompt_tokens - NEW_TOKENS)
        await super()._take_time(turn)

    def _server(self) -> web.Server:
        return TimedServer(self._handle, handler_cancellation=True)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        await request.read()
        asked = connection.arrived if isinstance(connection, TimedConnection) else time.monotonic()
        response = await super()._handle(request)
        if request.path == "/generate":
            await response.prepare(request)
            await response.write_eof()
            peer = socket.inet_aton(request.remote or "0.0.0.0")
            os.write(self._record, TIMES.pack(asked, time.monotonic(), peer) + PROMPT.get())
        return response


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """When the engine was asked for a turn and when it answered, in seconds on one clock."""

    asked: float
    answered: float
    peer: str
    """The IPv4 address of who asked."""
    length: int
    """The length of the prompt in tokens, which grows with every turn of a rollout."""


def read_turns(file: Path) -> dict[int, list[Turn]]:
    """Read the turns of each rollout in order, by the number in its prompt."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    turns: dict[int, list[Turn]] = defaultdict(list)
    for asked, answered, peer, length, *begin in RECORD.iter_unpack(file.read_bytes()):
        if found := re.search(r"Greet number (\d+) ", tokenizer.decode(begin)):
            turns[int(found[1])].append(Turn(asked, answered, socket.inet_ntoa(peer), length))
    return {number: sorted(ours) for number, ours in turns.items()}


async def main() -> None:
    parser = argparse.ArgumentParser(description="Run a scripted engine that records the times of each turn.")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds per turn")
    parser.add_argument("--command", default=COMMAND, help="what each turn runs in bash")
    parser.add_argument("--address", type=Path, required=True, help="write the URL to this file")
    parser.add_argument("--record", type=Path, required=True, help="append the turns to this file")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at")
    parser.add_argument("--port", type=int, default=0, help="port to listen at; 0 takes a free one")
    given = parser.parse_args()
    timed = TimedEngine(given.record, latency=given.delay, command=given.command, host=given.host, port=given.port)
    await serve(timed, address=given.address)


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
