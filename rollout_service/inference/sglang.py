"""The backend for engines that speak SGLang's native HTTP API, which the embedded engine does too.

`/generate` is called with `input_ids`, because SGLang's chat route and the routers in front of it lose
token ids. A call that is cancelled or runs out of time aborts its request in the engine before it returns.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anyio
import anyio.to_thread
import orjson

from api_schemas.inference import PauseMode
from rollout_service.inference.contract import BackendLoad, GenerateRequest, Generation, ModelInfo
from rollout_service.inference.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    GenerationTimeout,
    InferenceError,
    PromptTooLong,
)
from rollout_service.inference.sglang_wire import generate_body, parse_generation, parse_version

_CONNECT_SECONDS = 10.0
_CONTROL_SECONDS = 30.0
_ABORT_SECONDS = 2.0
_UPDATE_SECONDS = 900.0
_FLUSH_SECONDS = 30
_NOT_FLUSHED = "the cache was not flushed"
# Below the 5 seconds after which the engines' HTTP server drops an idle connection, so that no request
# is sent into one that is being closed.
_KEEPALIVE_SECONDS = 4.0
_JSON = {"Content-Type": "application/json"}


class SGLangBackend:
    """One SGLang server.

    Use it from one event loop; `close` releases its connections.

    Args:
        url: where the server listens, `http://host:port`.
        backend_id: its name in reports; host and port by default.
        timeout: seconds that one `generate` may take.
    """

    def __init__(self, url: str, *, backend_id: str | None = None, timeout: float = 1800.0) -> None:
        self._url = normalise_url(url)
        self._id = backend_id or urlsplit(self._url).netloc
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False
        self._vocab_size: int | None = None

    @property
    def id(self) -> str:
        return self._id

    @property
    def url(self) -> str:
        return self._url

    async def generate(self, request: GenerateRequest) -> Generation:
        body = orjson.dumps(generate_body(request))
        started = time.perf_counter()
        async with self._aborted_on_cancel(request.request_id):
            with anyio.move_on_after(self._timeout):
                answer = await self._call("POST", "/generate", content=body)
                return parse_generation(
                    answer,
                    request,
                    backend_id=self._id,
                    vocab_size=self._vocab_size,
                    engine_seconds=time.perf_counter() - started,
                )
        await self._abort_quietly(request.request_id)
        raise GenerationTimeout(
            f"no answer in {self._timeout:g} s",
            hint="Lower max_new_tokens, or raise the generation time-out",
            backend_id=self._id,
        )

    async def abort(self, request_id: str | None = None) -> None:
        await self._post("/abort_request", {"rid": request_id or "", "abort_all": request_id is None})

    async def pause(self, mode: PauseMode = PauseMode.ABORT) -> None:
        await self._post("/pause_generation", {"mode": mode.value})

    async def resume(self) -> None:
        await self._post("/continue_generation", {})

    async def update_weights(self, path: str, version: int, *, flush_cache: bool = True) -> None:
        body = {
            "model_path": path,
            "weight_version": str(version),
            "flush_cache": flush_cache,
            "abort_all_requests": False,
        }
        try:
            answer = await self._post("/update_weights_from_disk", body, seconds=_UPDATE_SECONDS)
        except BackendRejected as error:
            if not (flush_cache and _NOT_FLUSHED in str(error)):
                raise
            # The weights are in place, but a request that was aborted a moment ago still held its KV.
            await self._post(
                f"/flush_cache?timeout={_FLUSH_SECONDS}", {}, seconds=_FLUSH_SECONDS + _CONTROL_SECONDS
            )
            return
        if not (isinstance(answer, dict) and answer.get("success") is True):
            raise BackendProtocolError(f"weights from {path} gave {answer!r}", backend_id=self._id)

    async def model_info(self) -> ModelInfo:
        info = self._object(await self._get("/model_info"), "/model_info")
        models = self._object(await self._get("/v1/models"), "/v1/models").get("data")
        context_length = models[0].get("max_model_len") if isinstance(models, list) and models else None
        if not isinstance(context_length, int):
            raise BackendProtocolError("/v1/models names no max_model_len", backend_id=self._id)
        model_path = str(info.get("model_path", ""))
        vocab_size = info.get("vocab_size")
        if not isinstance(vocab_size, int):
            vocab_size = await anyio.to_thread.run_sync(_read_vocab_size, model_path)
        self._vocab_size = vocab_size
        return ModelInfo(
            model_path=model_path,
            tokenizer_path=str(info.get("tokenizer_path") or model_path),
            weight_version=parse_version(info.get("weight_version")),
            vocab_size=vocab_size,
            context_length=context_length,
        )

    async def health(self, *, paused: bool = False) -> None:
        # SGLang's /health samples a token, which a paused engine cannot.
        await self._call(
            "GET", "/model_info" if paused else "/health", seconds=_CONTROL_SECONDS, is_json=False
        )

    async def load(self) -> BackendLoad:
        loads = self._object(await self._get("/v1/loads"), "/v1/loads").get("loads")
        if not isinstance(loads, list) or not loads:
            raise BackendProtocolError("/v1/loads lists nothing", backend_id=self._id)
        try:
            return BackendLoad(
                running=sum(int(load["num_running_reqs"]) for load in loads),
                waiting=sum(int(load["num_waiting_reqs"]) for load in loads),
                used_tokens=sum(int(load["num_used_tokens"]) for load in loads),
                token_usage=max(float(load["token_usage"]) for load in loads),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BackendProtocolError(f"/v1/loads lacks {error}", backend_id=self._id) from error

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _aborted_on_cancel(self, request_id: str) -> AsyncIterator[None]:
        try:
            yield
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self._abort_quietly(request_id)
            raise

    async def _abort_quietly(self, request_id: str) -> None:
        """Abort within a bound; an engine that cannot be told will see the closed connection."""
        with anyio.move_on_after(_ABORT_SECONDS):
            try:
                await self.abort(request_id)
            except InferenceError:
                return

    async def _get(self, path: str) -> Any:
        return await self._call("GET", path, seconds=_CONTROL_SECONDS)

    async def _post(self, path: str, body: Mapping[str, Any], seconds: float = _CONTROL_SECONDS) -> Any:
        return await self._call("POST", path, content=orjson.dumps(body), seconds=seconds, is_json=None)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        seconds: float | None = None,
        is_json: bool | None = True,
    ) -> Any:
        """One HTTP exchange. `is_json=None` takes what is not JSON as None; False does not look at all."""
        session = self._open_session()
        limit = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with session.request(
                method, self._url + path, data=content, headers=_JSON, timeout=limit, allow_redirects=False
            ) as answer:
                status, raw = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BackendUnreachable(
                f"{method} {path} failed: {str(error) or type(error).__name__}",
                hint=f"Check that an engine listens at {self._url}",
                backend_id=self._id,
            ) from error
        if status != HTTPStatus.OK:
            raise self._refusal(status, path, raw)
        return self._decode(raw, path, is_json) if is_json is not False else None

    def _decode(self, raw: bytes, path: str, is_json: bool | None) -> Any:
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            if is_json is None:
                return None
            raise BackendProtocolError(
                f"{path} answered no JSON: {raw[:80]!r}", backend_id=self._id
            ) from error

    def _refusal(self, status: int, path: str, raw: bytes) -> InferenceError:
        message = f"{path} answered {status}: {_error_message(raw)}"
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS:
            return BackendUnreachable(message, hint="See the engine's log", backend_id=self._id)
        if "context length" in message:
            return PromptTooLong(
                message, hint="Shorten the prompt or lower max_new_tokens", backend_id=self._id
            )
        if status < HTTPStatus.BAD_REQUEST:
            return BackendProtocolError(
                message, hint="Register the engine's own address", backend_id=self._id
            )
        return BackendRejected(message, backend_id=self._id)

    def _object(self, answer: Any, path: str) -> Mapping[str, Any]:
        if not isinstance(answer, dict):
            raise BackendProtocolError(f"{path} answered no JSON object", backend_id=self._id)
        return answer

    def _open_session(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise BackendUnreachable("was removed", backend_id=self._id)
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session


def normalise_url(url: str) -> str:
    """`url` as scheme, host and port.

    Raises:
        ValueError: it is not a plain http or https address.
    """
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{url!r} is not an engine's address; it looks like http://host:30000")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"an engine's address has no user, query or fragment: {parts.hostname}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _error_message(raw: bytes) -> str:
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw[:500].decode(errors="replace")
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:500]


def _read_vocab_size(model_path: str) -> int | None:
    try:
        config = json.loads(Path(model_path, "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") if isinstance(config, dict) else None
    return size if isinstance(size, int) else None
