"""The bounds of one request, whatever its API.

A call that passes `check_call` has a bounded number of everything that is looped over for it. Its body was bounded in
bytes and in values before, and its prompt is compared with the model's context before it is rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Never, TypeVar, TypeVarTuple

import anyio.to_thread
import orjson
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar

from api_schemas.rollouts import Sampling
from rollout_service.base.errors import InvalidFieldError
from rollout_service.gateway.contract import ModelCall
from rollout_service.settings.http import GatewaySettings

MAX_STOPS = 16
"""The stop strings of a task; those of a program's request are added, up to `max_stops`."""
MAX_STOP_CHARS = 256
"""An engine decodes as many tokens again for each one that it samples."""
MAX_NAME_CHARS = 256
"""Every piece of a stream repeats the model's name."""
MAX_SCHEMA_BYTES = 256 * 1024
"""An engine compiles it while other requests wait."""


@dataclass(frozen=True, slots=True)
class BoundedFields:
    """The paths of the bounded fields in an API, for errors; empty where it has no such field."""

    messages: str
    tools: str
    schema: str
    answers: str = ""
    stops: str = ""


def check_call(call: ModelCall, names: BoundedFields, most: GatewaySettings) -> None:
    """Refuse a call that asks for more than the settings allow.

    Raises:
        InvalidFieldError: The field has too much, or a stop string is empty or too long.
    """
    messages = len(call.messages) + sum([len(message.calls) for message in call.messages])
    counts = (
        (call.n, most.max_answers, names.answers, "answers", "max_answers"),
        (messages, most.max_messages, names.messages, "messages", "max_messages"),
        (len(call.tools) + len(call.deferred_tools), most.max_tools, names.tools, "tools", "max_tools"),
        (len(call.stop), most.max_stops, names.stops, "stop strings", "max_stops"),
    )
    for count, limit, path, things, setting in counts:
        if count > limit:
            hint = f"Send fewer, or raise `{setting}` in `[gateway]`."
            _refuse(path, f"asks for {count} {things}, but at most {limit} are allowed", hint)
    check_stops(call.stop, names.stops)
    if len(call.model) > MAX_NAME_CHARS:
        _refuse("model", f"must have at most {MAX_NAME_CHARS} characters")
    if call.json_schema is not None and len(orjson.dumps(call.json_schema)) > MAX_SCHEMA_BYTES:
        _refuse(names.schema, f"must have at most {MAX_SCHEMA_BYTES} bytes")


def check_sampling(sampling: Sampling) -> None:
    """Refuse a task's stop strings under which every request of its rollouts would fail or be slow.

    Raises:
        InvalidFieldError: There are too many, or one is empty or too long.
    """
    path = "body.sampling.stop"
    if len(sampling.stop) > MAX_STOPS:
        _refuse(path, f"has {len(sampling.stop)} stop strings, but at most {MAX_STOPS} are allowed")
    check_stops(sampling.stop, path)


def check_stops(stops: Sequence[str], path: str) -> None:
    """Refuse stop strings that an engine would refuse, or that cost it too much.

    Raises:
        InvalidFieldError: One of them is empty or too long.
    """
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            _refuse(f"{path}.{index}", f"must have 1 to {MAX_STOP_CHARS} characters, and has {len(stop)}")


def _refuse(path: str, message: str, hint: str = "") -> Never:
    raise InvalidFieldError.at(path, message, hint=hint)


THREADS = 4
"""Requests that are read or rendered at once: each may take some hundred MB while it lasts."""

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")
_limiter: RunVar[CapacityLimiter] = RunVar("_gateway_threads")


async def in_thread(function: Callable[[*Arguments], T], *args: *Arguments) -> T:
    """Call a function that takes long in a thread, so that neither the event loop nor other work waits for it."""
    try:
        limiter = _limiter.get()
    except LookupError:
        limiter = CapacityLimiter(THREADS)
        _limiter.set(limiter)
    return await anyio.to_thread.run_sync(function, *args, limiter=limiter)
