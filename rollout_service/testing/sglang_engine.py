"""A scripted engine with SGLang's HTTP protocol, for tests, benchmarks and fault injection.

It costs little per request and keeps the protocol's promises; `TurnScheduler` decides how long turns take, and the
effect of aborts, pauses and weight updates. With `hardware` it has a prefix cache and takes time per token, like a real
engine; without, nothing is cached and `cached_tokens` is 0. Its logprobs are made up.
"""

import asyncio
import base64
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import numpy as np
import orjson
from aiohttp import web

from rollout_service.testing.engine_turn import (
    BREAKING,
    SAMPLED_LOGPROB,
    AfterTokens,
    ChunkStream,
    EndOfStreamError,
    EngineTurn,
    Fault,
    ScriptedRequest,
    experts,
    likeliest,
    prompt_logprob,
)
from rollout_service.testing.hardware import Hardware
from rollout_service.testing.scheduler import TurnScheduler
from rollout_service.testing.script import Script

_DEFAULT_BUDGET = 128
_SHUTDOWN_SECONDS = 0.01  # 0 would wait forever


class ScriptedEngine(TurnScheduler):
    """A scripted engine as an async context manager; inside, it listens at `url`.

    Args:
        script: decides the answers.
        latency: seconds per turn, without `hardware`.
        hardware: decides how long turns take and which tokens are cached.
        vocab_size: as reported; ids from here on do not exist.
        routing: layers and experts per token of a simulated mixture of experts; None for a dense model.
        context_length: longer requests are a 400.
        model_path: as reported.
        tokenizer_path: as reported; left out, `model_path`.
        faults: one per request, in order; None stands for a good answer, which later requests get too.
        incremental: whether it was started with --incremental-streaming-output.
        update_seconds: seconds that new weights take to load.
        host: address to listen at.
        port: port to listen at; 0 takes a free one.
    """

    def __init__(
        self,
        script: Script,
        *,
        latency: float = 0.0,
        hardware: Hardware | None = None,
        vocab_size: int = 512,
        routing: tuple[int, int] | None = None,
        context_length: int = 131_072,
        model_path: Path | str = "scripted",
        tokenizer_path: Path | None = None,
        faults: Iterable[Fault | AfterTokens | None] = (),
        incremental: bool = False,
        update_seconds: float = 0.0,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        super().__init__(script, latency=latency, hardware=hardware)
        self.healthy = True
        """Whether `/health` answers 200."""
        self.requests = 0
        """Calls of `/generate`."""
        self.traceparents: list[str | None] = []
        """The header of each of them; None where there was none."""
        self.cache_keys: list[str] = []
        """The key that keeps each one's cached prefixes apart; empty where there was none."""
        self.aborts: list[str] = []
        """Ids in calls of `/abort_request`; "*" for all requests."""
        self.died = anyio.Event()
        self._vocab_size = vocab_size
        self._routing = routing
        self._context_length = context_length
        self._model_path = str(model_path)
        self._tokenizer_path = tokenizer_path
        self._faults: deque[Fault | AfterTokens | None] = deque(faults)
        self._is_incremental = incremental
        self._update_seconds = update_seconds
        self._address = (host, port)
        self._runner: web.ServerRunner | None = None
        self._transports: set[asyncio.BaseTransport] = set()
        self._generate_path = "/generate"
        self._routes: dict[str, Callable[[dict[str, Any]], Awaitable[web.Response]]] = {
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._set_version,
            "/inject_fault": self._inject,
            "/flush_cache": self._flush,
            "/health": self._health,
            "/ready": self._ready,
            "/model_info": self._model_info,
            "/v1/models": self._models,
            "/v1/loads": self._loads,
        }

    @property
    def url(self) -> str:
        host, port = self._address
        return f"http://{host}:{port}"

    def inject(self, fault: Fault | AfterTokens, count: int = 1) -> None:
        """Inject a fault into the next `count` requests that have none."""
        self._faults.extend([fault] * count)

    async def __aenter__(self) -> Self:
        self._runner = web.ServerRunner(self._server(), shutdown_timeout=_SHUTDOWN_SECONDS)
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
        runner, self._runner = self._runner, None
        self.died.set()
        if runner is not None:
            for transport in self._transports:
                if isinstance(transport, asyncio.WriteTransport):
                    transport.abort()
            await runner.cleanup()

    def _server(self) -> web.Server:
        """Engines that time their connections, as benchmarks do, replace it."""
        return web.Server(self._handle, request_factory=_request_of_any_size, handler_cancellation=True)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        body = (orjson.loads(raw) if raw else {}) | dict(request.query)
        if request.path == self._generate_path:
            return await self._generate(body, request)
        route = self._routes.get(request.path)
        return await route(body) if route else json_answer({"error": {"message": "no such route"}}, 404)

    # ---- generation

    async def _generate(self, body: dict[str, Any], request: web.BaseRequest) -> web.StreamResponse:
        self.requests += 1
        self.traceparents.append(request.headers.get("traceparent"))
        self.cache_keys.append(body.get("extra_key") or body.get("cache_salt") or "")
        asked = self._read(body)
        if len(asked.ids) + asked.budget > self._context_length:
            return refusal(f"exceeds the model's context length of {self._context_length} tokens")
        fault = self._faults.popleft() if self._faults else None
        interval = self._stream_interval(body)
        late = fault if isinstance(fault, AfterTokens) and interval else None
        fault = fault.fault if isinstance(fault, AfterTokens) else fault
        if fault in BREAKING and late is None:
            return await self._break(fault, request)
        transport = request.transport
        if transport is not None:
            self._transports.add(transport)
        try:
            if interval is None:
                return json_answer(self._answer(await self._run(asked), fault))
            late = late or (AfterTokens(0, fault) if fault is not None else None)
            return await self._stream(asked, ChunkStream(request, interval, self._events, late, self._break))
        finally:
            if transport is not None:
                self._transports.discard(transport)

    async def _stream(self, asked: ScriptedRequest, stream: ChunkStream) -> web.StreamResponse:
        with suppress(EndOfStreamError):
            await stream.end(await self._run(asked, stream))
        return stream.response

    def _read(self, body: dict[str, Any]) -> ScriptedRequest:
        ids, start = body["input_ids"], body.get("logprob_start_len", -1)
        return ScriptedRequest(
            rid=body.get("rid") or uuid.uuid4().hex,
            ids=ids,
            budget=body.get("sampling_params", {}).get("max_new_tokens", _DEFAULT_BUDGET),
            top_logprobs=body.get("top_logprobs_num", 0),
            prompt_logprobs_from=start if 0 <= start < len(ids) else None,
            routed_experts_from=body.get("routed_experts_start_len", 0) if body.get("return_routed_experts") else None,
        )

    def _stream_interval(self, body: dict[str, Any]) -> int | None:
        """Return how many tokens a chunk has; None for an answer in one piece."""
        return body["sampling_params"].get("stream_interval", 1) if body.get("stream") else None

    def _events(self, turn: EngineTurn, fault: Fault | None, *, is_last: bool) -> list[dict[str, Any]]:
        if fault is Fault.QUEUE_ABORT:
            return [self._queue_abort()]
        chunk = self._answer(turn if self._is_incremental else replace(turn, since=0), fault)
        if not is_last:
            chunk["meta_info"]["finish_reason"] = None
            chunk["meta_info"].pop("routed_experts", None)
        return [chunk]

    def _answer(self, turn: EngineTurn, fault: Fault | None) -> dict[str, Any]:
        ids = self._output_ids(turn, fault)
        logprobs: list[list[float | None]] = [[value, id_, None] for value, id_ in self._logprobs(turn, fault)]
        meta = {
            "id": turn.rid,
            "finish_reason": turn.finish_reason(),
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.done,
            "cached_tokens": turn.cached_tokens,
            "weight_version": self.version,
            "output_token_logprobs": logprobs,
        } | self._extras(turn, fault)
        if fault is Fault.NO_LOGPROBS:
            del meta["output_token_logprobs"]
        if turn.spans:
            meta["weight_versions"] = turn.version_spans(self.version)
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def _output_ids(self, turn: EngineTurn, fault: Fault | None) -> list[int]:
        ids = turn.sampled
        if fault is Fault.BAD_ID:
            ids[-1] = self._vocab_size
        return ids

    def _logprobs(self, turn: EngineTurn, fault: Fault | None) -> list[tuple[float | None, int]]:
        pairs: list[tuple[float | None, int]] = [(SAMPLED_LOGPROB, token) for token in turn.sampled]
        if fault is Fault.BAD_LOGPROB:
            pairs[-1] = (None, pairs[-1][1])
        return pairs[:-1] if fault is Fault.SHORT_LOGPROBS else pairs

    def _extras(self, turn: EngineTurn, fault: Fault | None) -> dict[str, Any]:
        if fault is Fault.NO_EXTRAS:
            return {}
        asked, less = turn.asked, int(fault is Fault.SHORT_EXTRAS)
        extras: dict[str, Any] = {}
        if asked.top_logprobs:
            rows = [likeliest(id_, asked.top_logprobs, self._vocab_size) for id_ in turn.sampled]
            extras["output_top_logprobs"] = [
                [[value, id_, None] for id_, value in row] for row in rows[: len(rows) - less]
            ]
        if (first := asked.prompt_logprobs_from) is not None:
            values = [None, *(prompt_logprob(position) for position in range(first + 1, len(asked.ids)))]
            pairs = [[value, id_, None] for value, id_ in zip(values, asked.ids[first:], strict=True)]
            extras["input_token_logprobs"] = pairs[: len(pairs) - less]
        if (first := asked.routed_experts_from) is not None and self._routing:
            rows_wanted = turn.prompt_tokens + turn.done - 1 - first - less
            flat = np.array(list(experts(first, rows_wanted, self._routing)), "<i4")
            extras["routed_experts"] = base64.b64encode(flat.tobytes()).decode()
        return extras

    async def _break(self, fault: Fault | None, request: web.BaseRequest) -> web.StreamResponse:
        if fault is Fault.HANG:
            await anyio.sleep_forever()
        if fault is Fault.ERROR:
            return json_answer({"error": {"message": "scripted failure"}}, 500)
        if fault is Fault.GARBAGE:
            return web.Response(body=b'{"text": "cut off', content_type="application/json")
        if fault is Fault.QUEUE_ABORT:
            return json_answer(self._queue_abort())
        if fault is Fault.DIE:
            await self.die()
        elif request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)

    def _queue_abort(self) -> dict[str, Any]:
        reason = {"type": "abort", "message": "Abort in waiting queue"}
        return {
            "text": "",
            "output_ids": [],
            "meta_info": {"finish_reason": reason, "weight_version": self.version},
        }

    # ---- control

    async def _abort(self, body: dict[str, Any]) -> web.Response:
        rid = "" if body.get("abort_all") else body.get("rid", "")
        self.aborts.append(rid or "*")
        self._abort_turns(rid)
        return web.Response()

    async def _pause(self, body: dict[str, Any]) -> web.Response:
        if body.get("mode", "abort") == "abort":
            self._abort_turns("")
        self._hold_turns()
        return json_answer({"status": "ok"})

    async def _continue(self, _: dict[str, Any]) -> web.Response:
        self._release_turns()
        return json_answer({"status": "ok"})

    async def _update(self, body: dict[str, Any]) -> web.Response:
        await anyio.sleep(self._update_seconds)
        self._model_path = body["model_path"]
        self.version = body.get("weight_version") or self.version
        if body.get("flush_cache", True):
            await self._flush({})
        return json_answer({"success": True, "message": "", "num_paused_requests": 0})

    async def _set_version(self, body: dict[str, Any]) -> web.Response:
        self.version = body["new_version"]
        return json_answer({"success": True, "message": "", "new_version": self.version})

    async def _inject(self, body: dict[str, Any]) -> web.Response:
        self.inject(Fault(body["fault"]), body.get("count", 1))
        return json_answer({"status": "ok"})

    async def _flush(self, _: dict[str, Any]) -> web.Response:
        if self.accelerator is not None:
            self.accelerator.cache.flush()
        return web.Response()

    # ---- information

    async def _health(self, _: dict[str, Any]) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _ready(self, _: dict[str, Any]) -> web.Response:
        return web.Response(status=503 if self.paused or not self.healthy else 200)

    async def _model_info(self, _: dict[str, Any]) -> web.Response:
        info = {"model_path": self._model_path, "tokenizer_path": str(self._tokenizer_path or self._model_path)}
        return json_answer(info | {"weight_version": self.version, "vocab_size": self._vocab_size})

    async def _models(self, _: dict[str, Any]) -> web.Response:
        return json_answer({"data": [{"id": self._model_path, "max_model_len": self._context_length}]})

    async def _loads(self, _: dict[str, Any]) -> web.Response:
        if self.accelerator is None:
            load = {"num_running_reqs": self.in_flight, "num_waiting_reqs": 0}
            return json_answer({"loads": [load | {"num_used_tokens": 0, "token_usage": 0.0}]})
        return json_answer({"loads": [self.accelerator.load()]})


def _request_of_any_size(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    """Accept bodies as large as a real engine does, not only up to 1 MiB."""
    loop = asyncio.get_running_loop()
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=0)


def json_answer(content: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def refusal(message: str) -> web.Response:
    return json_answer({"error": {"message": message}}, 400)
