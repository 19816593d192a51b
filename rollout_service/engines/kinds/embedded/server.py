"""The embedded engine over HTTP, with SGLang's routes, bodies and answers.

Unlike SGLang, it answers token ids outside the vocabulary with a 400, and also text prompts, batches of prompts and
JSON schemas, which it does not support. It streams as SGLang does with `--incremental-streaming-output`.
"""

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.to_thread
import orjson
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from tokenizers import Tokenizer

from rollout_service.engines.kinds.embedded.bodies import (
    AbortBody,
    GenerateBody,
    PauseBody,
    PromptReading,
    UpdateBody,
    VersionBody,
)
from rollout_service.engines.kinds.embedded.job import EngineJob
from rollout_service.engines.kinds.embedded.sampler import SamplerSettings
from rollout_service.engines.kinds.embedded.scheduler import EngineBusyError, EngineCore, EngineOptions
from rollout_service.engines.kinds.embedded.weights import ModelError

FLUSH_CACHE = "/flush_cache"
ORDERS_BY_GET = frozenset({FLUSH_CACHE})
"""Routes that change something by GET too, as SGLang's do, since trainers call them that way."""
_BAD_REQUEST = 400
_UNAVAILABLE = 503


class BadRequestError(Exception):
    """A request that the engine refuses."""


@dataclass(frozen=True, slots=True)
class ServerState:
    engine: EngineCore
    tokenizer: Tokenizer | None


def create_app(model_path: str, options: EngineOptions | None = None, *, weight_version: str = "default") -> FastAPI:
    """Make an application; its engine runs while it does.

    Raises:
        ModelError: The folder does not hold a model that this engine can run.
    """
    file = Path(model_path, "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(file)) if file.exists() else None
    decode = partial(tokenizer.decode, skip_special_tokens=False) if tokenizer else None
    engine = EngineCore(model_path, options, decode=decode, weight_version=weight_version)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await anyio.to_thread.run_sync(engine.stop)

    app = FastAPI(title="Embedded engine", lifespan=lifespan)
    app.state.server_state = ServerState(engine, tokenizer)
    app.include_router(router)
    app.add_exception_handler(RequestValidationError, _refuse_body)
    app.add_exception_handler(BadRequestError, _refuse)
    app.add_exception_handler(ModelError, _fail_update)
    app.add_exception_handler(EngineBusyError, _fail_update)
    return app


async def _server_state(request: Request) -> ServerState:  # a plain function would run on another thread
    state: ServerState = request.app.state.server_state
    return state


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


Context = Annotated[ServerState, Depends(_server_state)]
router = APIRouter()


# ---- generation


@router.post("/generate")
async def generate(body: GenerateBody, request: Request, state: Context) -> Response:
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    job = _make_job(body, state.engine, lambda: loop.call_soon_threadsafe(changed.set))
    if job.stop_texts and state.tokenizer is None:
        raise BadRequestError("stop texts need a tokenizer.json beside the model; use stop_token_ids")
    if body.stream:
        return StreamingResponse(_stream(job, changed, body, state), media_type="text/event-stream")
    state.engine.submit(job)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_abort_on_disconnect, request, job, state.engine)
        await changed.wait()
        tasks.cancel_scope.cancel()
    return _json(_answer(job, job.meta_info(state.engine.weight_version), body, state))


async def _abort_on_disconnect(request: Request, job: EngineJob, engine: EngineCore) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    engine.abort(job.rid)


async def _stream(
    job: EngineJob, changed: asyncio.Event, body: GenerateBody, state: ServerState
) -> AsyncIterator[bytes]:
    state.engine.submit(job)
    try:
        sent, has_ended = 0, False
        while not has_ended:
            await changed.wait()
            changed.clear()
            meta = job.meta_info(state.engine.weight_version, sent)
            has_ended = meta["finish_reason"] is not None
            if has_ended or meta["completion_tokens"] - sent >= body.sampling_params.stream_interval:
                yield b"data: " + orjson.dumps(_answer(job, meta, body, state, sent)) + b"\n\n"
                sent = meta["completion_tokens"]
        yield b"data: [DONE]\n\n"
    finally:
        state.engine.abort(job.rid)


def _make_job(body: GenerateBody, engine: EngineCore, notify: Callable[[], object]) -> EngineJob:
    params = body.sampling_params
    _check_ids(body.input_ids, engine.vocab_size)
    _check_length(len(body.input_ids), params.max_new_tokens, engine.context_length)
    if params.json_schema is not None:
        raise BadRequestError("json_schema is not supported: this engine does not constrain what it samples.")
    if params.top_k == 0:
        raise BadRequestError("top_k must be -1 (disable) or at least 1, got 0.")
    stop_ids = set(params.stop_token_ids or ())
    seed = params.sampling_seed
    return EngineJob(
        rid=body.rid or uuid.uuid4().hex,
        prompt=body.input_ids,
        sampler=SamplerSettings(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=secrets.randbits(63) if seed is None else seed,
        ),
        max_new_tokens=params.max_new_tokens,
        stop_ids=frozenset(stop_ids if params.ignore_eos else stop_ids | engine.eos_token_ids),
        stop_texts=tuple([params.stop] if isinstance(params.stop, str) else params.stop or ()),
        notify=notify,
        streams=body.stream,
        reading=_reading(body),
        likely=body.top_logprobs_num if body.return_logprob else 0,
        namespace=int.from_bytes((body.extra_key or "").encode()),
    )


def _reading(body: GenerateBody) -> PromptReading | None:
    start = body.logprob_start_len
    if start < 0 or not body.return_logprob:
        return None
    if start >= len(body.input_ids):
        raise BadRequestError(f"logprob_start_len is {start}, but the input has {len(body.input_ids)} tokens.")
    return PromptReading(body.input_ids, start)


def _check_ids(ids: list[int], vocab_size: int) -> None:
    if min(ids) < 0 or max(ids) >= vocab_size:
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise BadRequestError(f"input id {wrong} is outside the vocabulary of {vocab_size}.")


def _check_length(prompt: int, budget: int, context: int) -> None:
    if prompt >= context:
        raise BadRequestError(
            f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
        )
    if prompt + budget > context:
        raise BadRequestError(
            f"Requested token count exceeds the model's maximum context length of {context} tokens: "
            f"{prompt} of the prompt and {budget} to sample."
        )


def _answer(
    job: EngineJob, meta: dict[str, Any], body: GenerateBody, state: ServerState, since: int = 0
) -> dict[str, Any]:
    # A stream reads while the engine writes.
    output = job.output[since : meta["completion_tokens"]]
    if not body.return_logprob:
        del meta["output_token_logprobs"], meta["output_token_logprobs_length"]
    skip, tokenizer = body.sampling_params.skip_special_tokens, state.tokenizer
    text = tokenizer.decode(output, skip_special_tokens=skip) if tokenizer else ""
    return {"text": text, "output_ids": output, "meta_info": meta}


# ---- control


@router.post("/abort_request")
async def abort_request(body: AbortBody, state: Context) -> Response:
    if body.rid or body.abort_all:
        await asyncio.wrap_future(state.engine.abort(None if body.abort_all else body.rid))
    return Response()


@router.post("/pause_generation")
async def pause_generation(body: PauseBody, state: Context) -> Response:
    await asyncio.wrap_future(state.engine.pause(body.mode))
    return _json({"message": "Generation paused successfully.", "status": "ok"})


@router.post("/continue_generation")
async def continue_generation(state: Context) -> Response:
    await asyncio.wrap_future(state.engine.resume())
    return _json({"message": "Generation continued successfully.", "status": "ok"})


@router.api_route(FLUSH_CACHE, methods=["GET", "POST"])
async def flush_cache(state: Context) -> Response:
    await asyncio.wrap_future(state.engine.flush_cache())
    return Response("Cache flushed.\n")


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(body: UpdateBody, state: Context) -> Response:
    engine = state.engine
    if body.abort_all_requests:
        await asyncio.wrap_future(engine.abort(None))
    done = await anyio.to_thread.run_sync(
        lambda: engine.update_weights(body.model_path, body.weight_version, flush_cache=body.flush_cache)
    )
    await asyncio.wrap_future(done)
    message = f"Succeeded to update model weights. Weight version is {engine.weight_version}."
    return _json({"success": True, "message": message, "num_paused_requests": 0})


@router.post("/update_weight_version")
async def update_weight_version(body: VersionBody, state: Context) -> Response:
    if body.abort_all_requests:
        await asyncio.wrap_future(state.engine.abort(None))
    await asyncio.wrap_future(state.engine.set_version(body.new_version))
    message = f"Weight version updated to {body.new_version}"
    return _json({"success": True, "message": message, "new_version": body.new_version})


# ---- information


@router.get("/health")
@router.get("/health_generate")
async def health(state: Context) -> Response:
    return Response(status_code=200 if state.engine.is_alive else _UNAVAILABLE)


@router.get("/ready")
async def ready(state: Context) -> Response:
    """Answer 200 only if a request would be served now."""
    is_ready = state.engine.is_alive and not state.engine.paused
    return Response(status_code=200 if is_ready else _UNAVAILABLE)


@router.get("/model_info")
async def model_info(state: Context) -> Response:
    engine = state.engine
    return _json(
        {
            "model_path": engine.model_path,
            "served_model_name": engine.model_path,
            "tokenizer_path": engine.model_path,
            "is_generation": True,
            "weight_version": engine.weight_version,
            "vocab_size": engine.vocab_size,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
        }
    )


@router.get("/v1/models")
async def models(state: Context) -> Response:
    engine = state.engine
    model = {"id": engine.model_path, "object": "model", "max_model_len": engine.context_length}
    return _json({"object": "list", "data": [model]})


@router.get("/server_info")
async def server_info(state: Context) -> Response:
    engine = state.engine
    stats = engine.stats
    return _json(
        {
            "engine": "embedded",
            "model_path": engine.model_path,
            "context_length": engine.context_length,
            "max_running_requests": engine.options.max_running,
            "max_total_num_tokens": engine.options.kv_tokens,
            "prompt_tokens_total": stats.prompt_tokens,
            "cached_tokens_total": stats.cached_tokens,
            "generation_tokens_total": stats.generated_tokens,
        }
    )


@router.get("/v1/loads")
async def loads(state: Context) -> Response:
    stats = state.engine.stats
    throughput = stats.generated_tokens / stats.busy_seconds if stats.busy_seconds else 0.0
    load = {
        "dp_rank": 0,
        "num_running_reqs": stats.running,
        "num_waiting_reqs": stats.waiting,
        "num_used_tokens": stats.reserved_tokens,
        "max_total_num_tokens": state.engine.options.kv_tokens,
        "token_usage": stats.reserved_tokens / state.engine.options.kv_tokens,
        "gen_throughput": throughput,
        "cache_hit_rate": stats.cached_tokens / stats.prompt_tokens if stats.prompt_tokens else 0.0,
    }
    return _json({"loads": [load]})


# ---- refusals


def _error(message: str) -> Response:
    return _json({"error": {"message": message, "type": "invalid_request_error", "code": _BAD_REQUEST}}, _BAD_REQUEST)


async def _refuse_body(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return _error(f"{where}: {first['msg']}")


async def _refuse(_: Request, error: Exception) -> Response:
    return _error(str(error))


async def _fail_update(_: Request, error: Exception) -> Response:
    return _json({"success": False, "message": str(error), "num_paused_requests": 0}, _BAD_REQUEST)
