"""The base of all backends over HTTP: connections, calls, and aborts.

A call that is cancelled or times out, or whose stream cannot be trusted, aborts its request in the engine before it
returns. An answer is JSON, or an error that names engine, route and status. A prompt that leaves no room for its budget
is never sent.
"""

import asyncio
import json
import re
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import numpy as np
import orjson
from numpy.typing import NDArray

from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.contract import GenerateRequest, Generation, ModelInfo, TokenSink
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    GenerationTimeout,
    InferenceError,
    PromptTooLong,
    SchemaRefused,
)
from rollout_service.engines.kinds.checks import answer_of, mapping
from rollout_service.engines.kinds.http_client import (
    ANSWER_BYTES,
    AnswerTimeoutError,
    AnswerTooLargeError,
    HttpClient,
)
from rollout_service.engines.kinds.token_stream import (
    TokenStream,
    as_one_chunk,
    generation_bytes,
    is_streamable,
)

CONTROL_SECONDS = 30.0
_ABORT_SECONDS = 2.0
_END_SECONDS = 5.0
_ABORT_AGAIN_SECONDS = 0.1
_OK = HTTPStatus.OK.value
_DONE = b"[DONE]"
_ERROR_STATUSES = range(400, 600)
_SCHEMA = re.compile("schema|grammar|structured", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}
_ERROR_KEYS = ("error", "message", "detail")
QUOTED_CHARACTERS = 500
"""The part of an engine's error message that is passed on."""
QUOTED_BYTES = 100
"""The part of an answer other than JSON that is passed on."""
INLINE_BYTES = 256 << 10
"""Larger answers are read in a thread. With the likeliest tokens, one of this size takes 30 ms."""
ParseAnswer = Callable[[object, GenerateRequest, str, ModelInfo | None, float], Generation]
"""Checks the answer to a request, given the backend's id, its model, and the seconds that the engine took."""
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


class HttpBackend(ABC):
    """The part of a `Backend` that all engines behind an HTTP server share, for one event loop.

    `backend_id` defaults to the location; `timeout` is of one `generate`, in seconds.
    """

    keeps_kv_apart = False

    def __init__(self, url: str, *, backend_id: str | None = None, timeout: float = 1800.0) -> None:
        self.url = normalize_url(url)
        self.id = backend_id or location_of(url)
        self._timeout = timeout
        self._client = HttpClient(self.url)
        self._is_closed = False
        self._info: ModelInfo | None = None
        self._open_calls = 0
        self._call_ended = ChangeSignal()

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        if self._info is not None:
            self._check_room(request, self._info)
        self._open_calls += 1
        try:
            return await self._answer(request, on_tokens)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                await self._abort_quietly(request.request_id)
            raise
        except BackendRejected as error:
            if request.sampling.json_schema is not None and _SCHEMA.search(str(error)):
                raise SchemaRefused(
                    str(error).removeprefix(f"backend {self.id}: "),
                    hint="Correct the schema, or use SGLang or vLLM if the engine does not constrain what it samples.",
                    backend_id=self.id,
                ) from error
            raise
        except BackendProtocolError:
            if on_tokens is not None:  # the answer may still be under way
                await self._abort_quietly(request.request_id)
            raise
        except AnswerTimeoutError as error:
            await self._abort_quietly(request.request_id)
            raise GenerationTimeout(
                str(error),
                hint="Lower max_new_tokens, or add engines if these are overloaded.",
                backend_id=self.id,
            ) from error
        finally:
            self._open_calls -= 1
            self._call_ended.notify()

    def has_weights(self, version: int) -> None:
        """Note the version of the weights, whoever has loaded them: KV of others is not found from now on."""
        if self._info is not None:
            self._info = replace(self._info, weight_version=version)

    async def close(self) -> None:
        self._is_closed = True
        await self._client.close()

    @abstractmethod
    async def abort(self, request_id: str | None = None) -> None: ...

    @abstractmethod
    async def _sample(self, request: GenerateRequest, on_tokens: TokenSink | None) -> Generation:
        """Ask the engine and check its answer."""

    async def _answer(self, request: GenerateRequest, on_tokens: TokenSink | None) -> Generation:
        if on_tokens is None or is_streamable(request):
            return await self._sample(request, on_tokens)
        generation = await self._sample(request, None)
        as_one_chunk(generation, on_tokens)
        return generation

    # ---- for subclasses

    async def _ask(
        self,
        path: str,
        body: Mapping[str, Any],
        request: GenerateRequest,
        stream: TokenStream | None,
        parse: ParseAnswer,
    ) -> Generation:
        """Send a request, and return its answer, checked by `stream` or else by `parse`; a large one in a thread."""
        started, content = time.perf_counter(), dump_request(body)
        max_bytes = generation_bytes(request, self._info)
        read: Callable[[float], Generation]
        if stream is not None:
            size, read = await self._stream(path, content, stream, max_bytes, request.traceparent), stream.whole
        else:
            raw = await self._exchange_bytes("POST", path, content, None, max_bytes, traceparent=request.traceparent)

            def parsed(taken: float) -> Generation:
                return parse(self._decode(raw, "POST", path), request, self.id, self._info, taken)

            size, read = len(raw), parsed
        seconds = time.perf_counter() - started
        generation = read(seconds) if size <= INLINE_BYTES else await anyio.to_thread.run_sync(read, seconds)
        if stream is not None:
            stream.end(generation)
        return generation

    async def _end_calls(self) -> None:
        """Abort until no call is open, since the first abort misses a request still on its way to the engine."""
        await self.abort()
        with anyio.move_on_after(_END_SECONDS):
            while self._open_calls:
                with anyio.move_on_after(_ABORT_AGAIN_SECONDS) as waiting:
                    await self._call_ended.wait()
                if waiting.cancelled_caught:
                    await self.abort()

    async def _get(self, path: str) -> Mapping[str, Any]:
        """Return the JSON object that answers a GET."""
        with answer_of(self.id):
            return mapping(self._decode(await self._get_bytes(path), "GET", path), f"the answer of {path}")

    async def _get_bytes(self, path: str) -> bytes:
        return await self._exchange_bytes("GET", path, None, CONTROL_SECONDS)

    async def _post(self, path: str, body: Mapping[str, Any], seconds: float = CONTROL_SECONDS) -> Any:
        """Return the answer's JSON; None if it is not JSON."""
        raw = await self._exchange_bytes("POST", path, orjson.dumps(body), seconds)
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            return None

    async def _call(self, path: str, content: bytes) -> Any:
        """Return the JSON of an exchange that may take as long as a generation."""
        return self._decode(await self._exchange_bytes("POST", path, content, None), "POST", path)

    async def _stream(
        self, path: str, content: bytes, stream: TokenStream, max_bytes: int, traceparent: str | None
    ) -> int:
        """Make one exchange that is answered in events of at most `max_bytes` each; return the bytes of all."""
        is_done, size = False, 0

        def take(event: bytes) -> None:
            nonlocal is_done, size
            is_done, size = is_done or event == _DONE, size + len(event)
            if not is_done:
                self._take_chunk(event, path, stream)

        await self._exchange_bytes("POST", path, content, None, max_bytes, take, traceparent)
        if not is_done:
            raise BackendUnreachable(
                f"{path} ended its stream before the answer",
                hint="See the engine's log.",
                backend_id=self.id,
            )
        return size

    def _take_chunk(self, event: bytes, path: str, stream: TokenStream) -> None:
        with answer_of(self.id):
            chunk = mapping(self._decode(event, "POST", path), "a chunk of the answer")
            if "error" in chunk:
                stated: Any = chunk["error"].get("code") if isinstance(chunk["error"], dict) else None
                # SGLang states none for a request that it refuses.
                raise self._refusal(stated if stated in _ERROR_STATUSES else HTTPStatus.BAD_REQUEST.value, path, event)
            stream.take(chunk)

    async def _exchange_bytes(
        self,
        method: str,
        path: str,
        content: bytes | None,
        seconds: float | None,
        max_bytes: int = ANSWER_BYTES,
        on_event: Callable[[bytes], None] | None = None,
        traceparent: str | None = None,
    ) -> bytes:
        if self._is_closed:
            raise BackendUnreachable("was removed from its pool", backend_id=self.id)
        try:
            status, raw = await self._client.exchange(
                method,
                path,
                content,
                seconds=self._timeout if seconds is None else seconds,
                max_bytes=max_bytes,
                on_event=on_event,
                traceparent=traceparent,
            )
        except AnswerTooLargeError as error:
            raise BackendProtocolError(
                f"{path} answered with more than {max_bytes} bytes",
                hint="Register the engine's own address.",
                backend_id=self.id,
            ) from error
        except OSError as error:
            if seconds is None and isinstance(error, AnswerTimeoutError):
                raise
            raise BackendUnreachable(
                f"{method} {path} failed: {str(error) or type(error).__name__}",
                hint=f"Check that an engine listens at {self.url}.",
                backend_id=self.id,
            ) from error
        if status != _OK:
            raise self._refusal(status, path, raw if method == "POST" else b"")
        return raw

    @contextmanager
    def _has_new_weights(self) -> Iterator[None]:
        """Raise a refusal as another error: an engine that refuses an update is taken to have kept its weights."""
        try:
            yield
        except BackendRejected as error:
            raise BackendProtocolError(
                f"loaded the weights, and then {str(error).removeprefix(f'backend {self.id}: ')}",
                hint="See the engine's log, then send the weights again.",
                backend_id=self.id,
            ) from error

    async def _context_length(self) -> tuple[str, int]:
        models = (await self._get("/v1/models")).get("data")
        first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
        length = first.get("max_model_len")
        if not isinstance(length, int):
            raise BackendProtocolError("/v1/models does not state max_model_len", backend_id=self.id)
        return str(first.get("root") or first.get("id") or ""), length

    # ---- private

    def _check_room(self, request: GenerateRequest, info: ModelInfo) -> None:
        length, budget = len(request.input_ids), request.sampling.max_new_tokens
        if length + budget > info.context_length:
            raise PromptTooLong(
                f"{length} prompt tokens and {budget} to sample exceed the context length {info.context_length}",
                hint="Shorten the prompt or lower max_new_tokens.",
                backend_id=self.id,
            )

    async def _abort_quietly(self, request_id: str) -> None:
        """Abort within a time limit; an engine that cannot be reached sees the closed connection."""
        with anyio.move_on_after(_ABORT_SECONDS):
            try:
                await self.abort(request_id)
            except InferenceError:
                return

    def _decode(self, raw: bytes, method: str, path: str) -> Any:
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            # The address may be another service's: nothing that a GET reads from it is passed on.
            quoted = f": {_quoted(raw)}" if method == "POST" else ""
            raise BackendProtocolError(
                f"{path} answered {_OK} with something other than JSON{quoted}",
                hint="Register the engine's own address.",
                backend_id=self.id,
            ) from error

    def _refusal(self, status: int, path: str, raw: bytes) -> InferenceError:
        said = _error_message(raw)
        message = f"{path} answered {status}" + (f": {said}" if said else "")
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
            return BackendUnreachable(message, hint="See the engine's log.", backend_id=self.id)
        if "context length" in message:
            return PromptTooLong(message, hint="Shorten the prompt or lower max_new_tokens.", backend_id=self.id)
        if status < HTTPStatus.BAD_REQUEST:
            return BackendProtocolError(message, hint="Register the engine's own address.", backend_id=self.id)
        return BackendRejected(message, hint="See the engine's log.", backend_id=self.id)


def normalize_url(url: str) -> str:
    """Return `url` as scheme, host, port and path, without a trailing slash.

    Raises:
        ValueError: `url` is not a plain http or https address.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is not an engine's address, such as http://host:30000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"an engine's address has no user, query or fragment: {parts.hostname}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def location_of(url: str) -> str:
    """Return host, port and, behind a gateway, its path."""
    parts = urlsplit(normalize_url(url))
    port = "" if parts.port else f":{_PORTS[parts.scheme]}"
    return f"{parts.netloc.lower()}{port}{parts.path}"


def kv_key(info: ModelInfo, salt: str) -> str:
    """Return the cache key that separates KV of these weights from that of other versions, and of other salts."""
    return f"weights-{info.weight_version}{f'-{salt}' if salt else ''}"


async def read_model_config(model_path: str) -> dict[str, Any]:
    """Return the text model's `config.json`; empty if it cannot be read from here."""
    return await anyio.to_thread.run_sync(_read_model_config, model_path)


def routing_shape(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return layers and experts per token from a `config.json`; None unless it is a mixture of experts."""
    layers = config.get("num_hidden_layers")
    experts = next((config[name] for name in _EXPERTS_PER_TOKEN if isinstance(config.get(name), int)), None)
    return (layers, experts) if isinstance(layers, int) and isinstance(experts, int) and experts else None


def _read_model_config(model_path: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(model_path, "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def _error_message(raw: bytes) -> str:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return ""
    said = next((body[key] for key in _ERROR_KEYS if key in body), "") if isinstance(body, dict) else ""
    if isinstance(said, dict):
        said = said.get("message", "")
    return _printable(said if isinstance(said, str) else str(said))


def _quoted(raw: bytes) -> str:
    return repr(_printable(raw[:QUOTED_BYTES].decode(errors="replace")))


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text[:QUOTED_CHARACTERS])


def prompt_for_json(ids: Sequence[int]) -> list[int] | NDArray[Any]:
    """Return ids for `dump_request`; an array must not grow while the result is in use."""
    if isinstance(ids, array):
        return np.frombuffer(ids, dtype=ids.typecode)
    return ids if isinstance(ids, list) else list(ids)


def dump_request(body: Mapping[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
