"""A scripted engine for `gateway.py`: SGLang's `/generate`, a chat route that costs as little, and a record of its ids.

Every answer is a sentence and a call of the tool `bash`, different for each prompt. `/v1/chat/completions` answers
without rendering the messages, in the form of vLLM; with `return_token_ids` it adds ids, as many for the prompt as its
text would have. The ids that `/generate` samples are appended to a file, each answer after its length, unless the
request's id begins with `unrecorded-`.

Run: python benchmarks/programs/gateway_engine.py --address FILE --record FILE [--latency SECONDS]
"""

from __future__ import annotations

import argparse
import json
import os
import uuid
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
from aiohttp import web
from tokenizers import Tokenizer

from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Reply, ScriptedEngine
from rollout_service.testing.engine_turn import (
    SAMPLED_LOGPROB,
    ChunkStream,
    EngineTurn,
    Fault,
    ScriptedRequest,
)
from rollout_service.testing.serving import serve
from rollout_service.testing.sglang_engine import json_answer

MODEL = policy_folder("calc-tuned")
CONTEXT_LENGTH = 2_000_000
CHARACTERS_PER_TOKEN = 2.5
"""About those of the shipped policy's tokenizer on the benchmark's texts."""
UNRECORDED = "unrecorded-"
"""How the ids of requests begin whose answers nothing captures."""
CHUNK_TOKENS = 8
"""The tokens of a chunk, as the service asks for."""
TEXTS = (
    "I will look at part ",
    ' first.\n<tool_call>\n{"name": "bash", "arguments": {"command": "cat part-',
    '"}}\n</tool_call><|im_end|>',
)
"""An answer, without the number that stands between its texts."""


class NumberedCalls:
    """A script whose answers contain a number that depends on the prompt."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        self._before, self._between, self._end = (self._ids(text) for text in TEXTS)
        self._digits = [self._ids(str(digit)) for digit in range(10)]

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        del budget
        number = zlib.crc32(array("i", input_ids).tobytes())
        digits = [token for digit in str(number) for token in self._digits[int(digit)]]
        return Reply([*self._before, *digits, *self._between, *digits, *self._end])

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


class RecordingEngine(ScriptedEngine):
    """An engine with a chat route."""

    def __init__(self, record: Path, latency: float) -> None:
        self._numbered = NumberedCalls()
        super().__init__(self._numbered, latency=latency, model_path=MODEL, context_length=CONTEXT_LENGTH)
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._calls = 0

    async def _run(self, asked: ScriptedRequest, stream: ChunkStream | None = None) -> EngineTurn:
        turn = await super()._run(asked, stream)
        if not asked.rid.startswith(UNRECORDED):
            ids = turn.reply.ids[: turn.done]
            os.write(self._record, array("i", [len(ids), *ids]).tobytes())
        return turn

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path != "/v1/chat/completions":
            return await super()._handle(request)
        return await self._chat(json.loads(await request.read()), request)

    async def _chat(self, body: dict[str, Any], request: web.BaseRequest) -> web.StreamResponse:
        self._calls += 1
        asked = ScriptedRequest(UNRECORDED + uuid.uuid4().hex, [self._calls], body.get("max_tokens", 512))
        if body.get("stream"):
            chunks = ChunkStream(request, CHUNK_TOKENS, self._deltas, None, self._break)
            return await self._stream(asked, chunks)
        turn = await self._run(asked)
        return json_answer(self._completion(turn, body, request.content_length or 0))

    def _deltas(self, turn: EngineTurn, fault: Fault | None, *, is_last: bool) -> list[dict[str, Any]]:
        del fault
        text = self._numbered.tokenizer.decode(turn.sampled)
        return [{"choices": [{"delta": {"content": text}, "finish_reason": "stop" if is_last else None}]}]

    def _completion(self, turn: EngineTurn, body: dict[str, Any], size: int) -> dict[str, Any]:
        text, _, call = self._numbered.tokenizer.decode(turn.reply.ids).partition("\n<tool_call>\n")
        function = json.loads(call.partition("\n</tool_call>")[0])
        function["arguments"] = json.dumps(function["arguments"])
        calls = [{"id": f"call-{self._calls}", "type": "function", "function": function}]
        message = {"role": "assistant", "content": text, "tool_calls": calls}
        choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        prompt = [1] * int(size / CHARACTERS_PER_TOKEN)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": turn.done}
        answer = {"id": turn.rid, "object": "chat.completion", "choices": [choice], "usage": usage}
        if body.get("logprobs"):
            row = {"token": "token", "logprob": SAMPLED_LOGPROB, "bytes": [116], "top_logprobs": []}
            choice["logprobs"] = {"content": [row] * turn.done}
        if body.get("return_token_ids"):
            choice["token_ids"], answer["prompt_token_ids"] = list(turn.reply.ids), prompt
        return answer


async def main() -> None:
    parser = argparse.ArgumentParser(description="Run a scripted engine that records what it samples.")
    parser.add_argument("--address", type=Path, required=True, help="write the URL to this file")
    parser.add_argument("--record", type=Path, required=True, help="append the sampled ids to this file")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds per turn")
    given = parser.parse_args()
    await serve(RecordingEngine(given.record, given.latency), address=given.address)


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
