"""A vLLM engine in a trainer's process, behind the part of SGLang's HTTP API that the service uses.

Ids and log-probabilities are vLLM's own. A request is refused if the engine computes the log-probabilities of another
distribution than the one asked for. A request that is aborted, or whose connection is gone, ends in the engine; a
streamed one is answered as a whole. All routes are below a random path, without which nobody can use them. None loads
weights, which are the trainer's. The server ends with its process.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Body = Mapping[str, Any]

_SAME = (
    "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty stop stop_token_ids "
    "ignore_eos skip_special_tokens spaces_between_special_tokens"
)
_PARAMETERS = {name: name for name in _SAME.split()} | {
    "max_new_tokens": "max_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_ABORT_AGAIN_SECONDS = 0.1


class EngineServer:
    """Serves an `AsyncLLMEngine`; use it in the engine's event loop."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._model = engine, engine.model_config
        self._path = f"/{secrets.token_urlsafe(24)}"
        self._open: dict[str, list[int]] = {}
        """The tokens, read and sampled, of the requests under way."""
        self._is_paused = False
        self.version = 0
        self.signs = 0
        """Grows while the trainer works on the engine, so that requests which wait for it do not look stuck."""

    async def start(self, host: str) -> str:
        """Listen on a free port of this machine's address, and return the engine's address.

        Raises:
            RuntimeError: The package uvicorn is missing.
        """
        try:
            import uvicorn
        except ImportError as error:
            raise RuntimeError("serving an engine needs uvicorn: run `pip install uvicorn`") from error
        family, name = (socket.AF_INET6, f"[{host}]") if ":" in host else (socket.AF_INET, host)
        listener = socket.create_server((host, 0), family=family)
        config = uvicorn.Config(
            self._serve, interface="asgi3", lifespan="off", ws="none", log_config=None, access_log=False
        )
        config.load()
        self._http = uvicorn.Server(config)
        self._http.lifespan = config.lifespan_class(config)
        # `serve` would take over the process's signals, and need a task that waits for it.
        await self._http.startup([listener])
        return f"http://{name}:{listener.getsockname()[1]}{self._path}"

    async def _serve(self, scope: Body, receive: Receive, send: Send) -> None:
        secret, path = self._path.encode(), scope["path"].encode()
        is_known = secrets.compare_digest(path[: len(secret)], secret)
        route = f"{scope['method']} {path[len(secret) :].decode()}" if is_known else ""
        try:
            body = json.loads(await _read(receive) or "{}")
            text, status = json.dumps(await self._answer(route, body, receive)), 200
            if body.get("stream"):
                text = f"data: {text}\n\ndata: [DONE]\n\n"
        except Exception as error:  # noqa: BLE001 - the service decides what to do
            text, status = json.dumps({"error": f"{type(error).__name__}: {error}"}), _status_of(error)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text.encode()})

    async def _answer(self, route: str, body: Body, receive: Receive) -> object:
        match route:
            case "POST /generate":
                return await self._generate(body, receive)
            case "POST /abort_request":
                rids = [rid for rid in self._open if body.get("abort_all") or rid == body["rid"]]
                return await self._engine.abort(rids)
            case "POST /pause_generation":
                self._is_paused = True
                return await self._engine.pause_generation(mode="keep", clear_cache=False)
            case "POST /continue_generation" if self._is_paused:
                self._is_paused = False
                return await self._engine.resume_generation()
            case "POST /continue_generation":
                return None  # a pause may be the trainer's, while it loads weights
            case "GET /health":
                return await self._engine.check_health()
            case _:
                return self._describe(route)

    def _describe(self, route: str) -> object:
        model = self._model
        match route:
            case "GET /model_info":
                return {
                    "model_path": model.model,
                    "tokenizer_path": model.tokenizer,
                    "weight_version": self.version,
                    "vocab_size": model.get_vocab_size(),
                }
            case "GET /v1/models":
                return {"data": [{"id": model.model, "max_model_len": model.max_model_len}]}
            case "GET /v1/loads":
                return {"loads": [self._load()]}
        raise LookupError("there is no such route; the weights of this engine are its trainer's")

    def _load(self) -> dict[str, object]:
        cache = self._engine.vllm_config.cache_config
        capacity = cache.num_gpu_blocks * cache.block_size
        used = sum(map(len, self._open.values()))
        return {
            "num_running_reqs": len(self._open),
            "num_waiting_reqs": 0,
            "num_used_tokens": used,
            "token_usage": min(1.0, used / capacity),
            "max_total_num_tokens": capacity,
            "signs": self.signs,
        }

    async def _generate(self, body: Body, receive: Receive) -> object:
        parameters, prompt = _parameters(body["sampling_params"]), list(body["input_ids"])
        _check(self._model, prompt, parameters)
        self._open[body["rid"]] = list(prompt)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._abort_when_gone, receive, body["rid"])
            answer = await self._sample(body, prompt, parameters)
            tasks.cancel_scope.cancel()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _sample(self, body: Body, prompt: list[int], parameters: Any) -> dict[str, Any] | Exception:
        """Return the answer, or the failure. vLLM's generator is never cancelled, since that cuts off its clean-up."""
        tokens, logprobs = self._open[body["rid"]], []
        asked = {"prompt_token_ids": prompt, "cache_salt": body.get("extra_key") or None}
        try:
            async for output in self._engine.generate(asked, parameters, body["rid"]):
                (part,) = output.outputs
                tokens += part.token_ids
                pairs = zip(part.token_ids, part.logprobs or (), strict=True)
                logprobs += [[likely[token].logprob, token, None] for token, likely in pairs]
        except Exception as error:  # noqa: BLE001 - raised again where it does not become part of a group
            return error
        finally:
            del self._open[body["rid"]]
        meta = {
            "finish_reason": {"type": part.finish_reason, "matched": part.stop_reason},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(logprobs),
            "cached_tokens": output.num_cached_tokens or 0,
            "weight_version": self.version,
            "output_token_logprobs": logprobs,
        }
        return {"output_ids": tokens[len(prompt) :], "meta_info": meta}

    async def _abort_when_gone(self, receive: Receive, rid: str) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        while True:  # the first time, the request may still be on its way into the engine
            await self._engine.abort(rid)
            await anyio.sleep(_ABORT_AGAIN_SECONDS)


def _parameters(given: Body) -> Any:
    """Return vLLM's sampling parameters for SGLang's; unknown ones are refused."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if unknown := ", ".join(given.keys() - _PARAMETERS.keys() - {"stream_interval"}):
        raise ValueError(f"this engine has no sampling parameter {unknown}")
    return SamplingParams(
        **{ours: given[name] for name, ours in _PARAMETERS.items() if name in given},
        detokenize=bool(given.get("stop")),
        logprobs=0,
        output_kind=RequestOutputKind.DELTA,
    )


def _check(model: Any, prompt: list[int], parameters: Any) -> None:
    """Refuse what vLLM would cut, and log-probabilities of another distribution."""
    if len(prompt) + parameters.max_tokens > model.max_model_len:
        raise ValueError(f"prompt and budget exceed the model's context length of {model.max_model_len}")
    mode = getattr(model.logprobs_mode, "value", model.logprobs_mode)
    possible = {"raw_logprobs", "processed_logprobs"}
    if parameters.temperature not in (0, 1):
        possible.remove("raw_logprobs")
    if parameters.top_p < 1 or parameters.top_k > 0 or parameters.min_p > 0:
        possible.remove("processed_logprobs")
    if mode not in possible:
        raise ValueError(
            f"the engine, with {mode}, does not compute the logprobs of this sampling: raw_logprobs need temperature "
            "1, and processed_logprobs no top_p, top_k or min_p"
        )


def _status_of(error: Exception) -> int:
    from vllm.exceptions import VLLMValidationError

    if isinstance(error, LookupError):
        return 404
    return 400 if isinstance(error, (TypeError, ValueError, VLLMValidationError)) else 500


async def _read(receive: Receive) -> bytes:
    parts, message = [], {"more_body": True}
    while message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
    return b"".join(parts)
