"""An engine that answers from a script over SGLang's HTTP protocol: for tests, benchmarks and the injection of faults.

It costs little per request, takes a given time per turn however many there are, and keeps the protocol's promises:
an abort hands back the tokens whose time has passed, a pause stops the clock, a weight update in between shows
in the versions. Its logprobs are made up, and its `cached_tokens` are 0 because it caches nothing.
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import orjson
from aiohttp import web

from rollout_service.inference.fakes.script import Reply, Script

_BASE_ID_LENGTH = 32  # the part of a request id that its attempts share
_LOGPROB = -0.5
_DEFAULT_BUDGET = 128
_SHUTDOWN_SECONDS = 0.01  # 0 would wait for ever


class Fault(StrEnum):
    """What may go wrong with one request."""

    DROP = "drop"
    """The connection is closed without an answer."""
    HANG = "hang"
    """No answer comes."""
    GARBAGE = "garbage"
    """The answer is not JSON."""
    ERROR = "error"
    """The answer is a 500."""
    NO_LOGPROBS = "no_logprobs"
    SHORT_LOGPROBS = "short_logprobs"
    """One logprob is missing."""
    BAD_ID = "bad_id"
    """A sampled id is outside the vocabulary."""
    QUEUE_ABORT = "queue_abort"
    """The answer is an abort without tokens, logprobs and counts, as SGLang's for a request in its queue."""
    DIE = "die"
    """The engine closes every connection and listens no more."""


@dataclass(slots=True, eq=False)
class _Turn:
    """One request that is being answered."""

    rid: str
    prompt_tokens: int
    reply: Reply
    done: int = 0
    """Tokens whose time has passed."""
    elapsed: float = 0.0
    aborted: bool = False
    spans: list[tuple[str, int]] = field(default_factory=list)
    """Versions and the number of tokens at which they ended."""
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine:
    """Use as an async context manager; `url` is where it listens.

    Args:
        script: what it answers.
        latency: seconds per turn.
        vocab_size: as reported; ids from here on do not exist.
        context_length: longer requests are a 400.
        model_path: as reported, also for the tokenizer.
        faults: one per request, in order; None is a good answer, as is everything after the last.
        host: address to listen at.
        port: port to listen at; 0 takes a free one.
    """

    def __init__(
        self,
        script: Script,
        *,
        latency: float = 0.0,
        vocab_size: int = 512,
        context_length: int = 131_072,
        model_path: Path | str = "scripted",
        faults: Iterable[Fault | None] = (),
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.latency = latency
        self.healthy = True
        """What `/health` says."""
        self.version = "default"
        self.paused = False
        self.requests = 0
        """Requests to `/generate` so far."""
        self.aborts: list[str] = []
        """Ids of `/abort_request` so far; "*" for all."""
        self.died = anyio.Event()
        self._script = script
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._model_path = str(model_path)
        self._faults: deque[Fault | None] = deque(faults)
        self._address = (host, port)
        self._turns: dict[str, _Turn] = {}
        self._handed_back: dict[str, int] = {}
        self._resumed = asyncio.Event()
        self._runner: web.ServerRunner | None = None
        self._transports: set[asyncio.BaseTransport] = set()
        self._routes: dict[str, Callable[[dict[str, Any]], Awaitable[web.Response]]] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._set_version,
            "/inject_fault": self._inject,
            "/flush_cache": self._nothing,
            "/health": self._health,
            "/ready": self._ready,
            "/model_info": self._model_info,
            "/v1/models": self._models,
            "/v1/loads": self._loads,
        }

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._address
        return f"http://{host}:{port}"

    @property
    def in_flight(self) -> int:
        """Requests that are being answered."""
        return len(self._turns)

    def inject(self, fault: Fault, count: int = 1) -> None:
        """Let the next `count` requests go wrong."""
        self._faults.extend([fault] * count)

    async def __aenter__(self) -> Self:
        self._runner = web.ServerRunner(
            web.Server(self._handle, handler_cancellation=True), shutdown_timeout=_SHUTDOWN_SECONDS
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, *self._address, backlog=2048)
        await site.start()
        self._address = self._runner.addresses[0][:2]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.die()

    async def die(self) -> None:
        """Close every connection and listen no more."""
        runner, self._runner = self._runner, None
        self.died.set()
        if runner is not None:
            for transport in self._transports:
                if isinstance(transport, asyncio.WriteTransport):
                    transport.abort()
            await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        body = orjson.loads(raw) if raw else {}
        if request.path == "/generate":
            return await self._generate(body, request)
        route = self._routes.get(request.path)
        return await route(body) if route else _json({"error": {"message": "no such route"}}, 404)

    # ---- generation

    async def _generate(self, body: dict[str, Any], request: web.BaseRequest) -> web.StreamResponse:
        self.requests += 1
        ids = body["input_ids"]
        budget = body.get("sampling_params", {}).get("max_new_tokens", _DEFAULT_BUDGET)
        if len(ids) + budget > self._context_length:
            return _refusal(f"exceeds the model's context length of {self._context_length} tokens")
        fault = self._faults.popleft() if self._faults else None
        if fault in _BREAKING:
            return await self._break(fault, request)
        turn = self._make_turn(body.get("rid") or uuid.uuid4().hex, ids, budget)
        self._turns[turn.rid] = turn
        transport = request.transport
        if transport is not None:
            self._transports.add(transport)
        try:
            await self._sample(turn)
        finally:
            del self._turns[turn.rid]
            if transport is not None:
                self._transports.discard(transport)
        return self._answer(turn, fault)

    def _make_turn(self, rid: str, ids: list[int], budget: int) -> _Turn:
        # A request that goes on after an abort has its own tokens at the end of its prompt.
        given = self._handed_back.pop(rid[:_BASE_ID_LENGTH], 0)
        whole = self._script.reply(ids[: len(ids) - given], budget + given)
        left = whole.ids[given : given + budget]
        return _Turn(rid, len(ids), Reply(left, whole.stops and given + len(left) == len(whole.ids)))

    async def _sample(self, turn: _Turn) -> None:
        """Let the turn's time pass."""
        while not turn.aborted and (self.paused or turn.elapsed < self.latency):
            if self.paused:
                await self._wait_for_resume(turn)
                continue
            started = time.perf_counter()
            with anyio.move_on_after(self.latency - turn.elapsed):
                await turn.interrupted.wait()
            turn.elapsed += time.perf_counter() - started
            turn.done = int(min(1.0, turn.elapsed / self.latency) * len(turn.reply.ids))
        if not turn.aborted:
            turn.done = len(turn.reply.ids)

    async def _wait_for_resume(self, turn: _Turn) -> None:
        turn.interrupted.clear()
        turn.spans.append((self.version, turn.done))
        resumed = self._resumed
        async with anyio.create_task_group() as tasks:

            async def first(event: asyncio.Event) -> None:
                await event.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, resumed)
            tasks.start_soon(first, turn.interrupted)

    def _answer(self, turn: _Turn, fault: Fault | None) -> web.Response:
        ids = list(turn.reply.ids[: turn.done])
        if turn.aborted:
            self._handed_back[turn.rid[:_BASE_ID_LENGTH]] = turn.done
        logprobs: list[list[float | None]] | None = [[_LOGPROB, token, None] for token in ids]
        if fault is Fault.BAD_ID:
            ids[-1] = self._vocab_size
        meta = {
            "id": turn.rid,
            "finish_reason": _finish_reason(turn),
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": self.version,
            "output_token_logprobs": logprobs[:-1]
            if logprobs and fault is Fault.SHORT_LOGPROBS
            else logprobs,
        }
        if fault is Fault.NO_LOGPROBS:
            del meta["output_token_logprobs"]
        if turn.spans:
            meta["weight_versions"] = _version_spans(turn, self.version)
        return _json({"text": "", "output_ids": ids, "meta_info": meta})

    async def _break(self, fault: Fault | None, request: web.BaseRequest) -> web.StreamResponse:
        if fault is Fault.HANG:
            await anyio.sleep_forever()
        if fault is Fault.ERROR:
            return _json({"error": {"message": "scripted failure"}}, 500)
        if fault is Fault.GARBAGE:
            return web.Response(body=b'{"text": "cut off', content_type="application/json")
        if fault is Fault.QUEUE_ABORT:
            reason = {"type": "abort", "message": "Abort in waiting queue"}
            meta = {"finish_reason": reason, "weight_version": self.version}
            return _json({"text": "", "output_ids": [], "meta_info": meta})
        if fault is Fault.DIE:
            await self.die()
        elif request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)

    # ---- control

    async def _abort(self, body: dict[str, Any]) -> web.Response:
        rid = "" if body.get("abort_all") else body.get("rid", "")
        self.aborts.append(rid or "*")
        self._abort_turns(rid)
        return web.Response()

    def _abort_turns(self, rid_prefix: str) -> None:
        for turn in self._turns.values():
            if turn.rid.startswith(rid_prefix):
                turn.aborted = True
                turn.interrupted.set()

    async def _pause(self, body: dict[str, Any]) -> web.Response:
        if body.get("mode", "abort") == "abort":
            self._abort_turns("")
        self.paused = True
        for turn in self._turns.values():
            turn.interrupted.set()
        return _json({"status": "ok"})

    async def _continue(self, _: dict[str, Any]) -> web.Response:
        self.paused = False
        self._resumed.set()
        self._resumed = asyncio.Event()
        return _json({"status": "ok"})

    async def _update(self, body: dict[str, Any]) -> web.Response:
        self._model_path = body["model_path"]
        self.version = body.get("weight_version") or self.version
        return _json({"success": True, "message": "", "num_paused_requests": 0})

    async def _set_version(self, body: dict[str, Any]) -> web.Response:
        self.version = body["new_version"]
        return _json({"success": True, "message": "", "new_version": self.version})

    async def _inject(self, body: dict[str, Any]) -> web.Response:
        self.inject(Fault(body["fault"]), body.get("count", 1))
        return _json({"status": "ok"})

    # ---- information

    async def _nothing(self, _: dict[str, Any]) -> web.Response:
        return web.Response()

    async def _health(self, _: dict[str, Any]) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _ready(self, _: dict[str, Any]) -> web.Response:
        return web.Response(status=503 if self.paused or not self.healthy else 200)

    async def _model_info(self, _: dict[str, Any]) -> web.Response:
        info = {"model_path": self._model_path, "tokenizer_path": self._model_path}
        return _json(info | {"weight_version": self.version, "vocab_size": self._vocab_size})

    async def _models(self, _: dict[str, Any]) -> web.Response:
        return _json({"data": [{"id": self._model_path, "max_model_len": self._context_length}]})

    async def _loads(self, _: dict[str, Any]) -> web.Response:
        load = {"num_running_reqs": self.in_flight, "num_waiting_reqs": 0}
        return _json({"loads": [load | {"num_used_tokens": 0, "token_usage": 0.0}]})


_BREAKING = frozenset({Fault.DROP, Fault.HANG, Fault.GARBAGE, Fault.ERROR, Fault.QUEUE_ABORT, Fault.DIE})


def _finish_reason(turn: _Turn) -> dict[str, object]:
    if turn.aborted:
        return {"type": "abort", "message": "Aborted by request"}
    if turn.reply.stops:
        return {"type": "stop", "matched": turn.reply.ids[-1]}
    return {"type": "length", "length": turn.done}


def _version_spans(turn: _Turn, version: str) -> list[dict[str, object]]:
    spans: list[dict[str, object]] = []
    start = 0
    for name, end in [*turn.spans, (version, turn.done)]:
        if spans and spans[-1]["version"] == name:
            spans[-1]["end"] = end
        elif end > start:
            spans.append({"version": name, "start": start, "end": end})
        start = end
    return spans


def _json(content: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def _refusal(message: str) -> web.Response:
    return _json({"error": {"message": message}}, 400)
