"""Saved turns: the state from which a conversation continues after its last whole turn, as bytes.

Decoding returns the encoded turns, to the last bit of every log-probability. Bytes that are damaged, or that another
release wrote in another form, are an error.

Layout, compressed as a whole: the header's length (uint32, little-endian), the header (JSON), then the columns of
numbers, whose types and lengths are in the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from pydantic import TypeAdapter

from api_schemas.trajectories import FinishReason, ForkReason, Message
from rollout_service.engines.contract import NOTHING_RETURNED, Generation, ReturnedExtras, TopLogprob

_FORM = 1
_LEVEL = 1
_LENGTH = struct.Struct("<I")
_MESSAGES = TypeAdapter(list[Message])
_UNREADABLE = (ValueError, KeyError, TypeError, IndexError, zstandard.ZstdError, struct.error)


class UnreadableTurnError(Exception):
    """A saved turn is damaged, or was written in a form that this release does not know."""


@dataclass(frozen=True, slots=True)
class GivenMessages:
    messages: list[Message]
    reason: ForkReason | None
    """None if they were added; else why they replaced the whole history."""


@dataclass(frozen=True, slots=True)
class SavedTurn:
    given: list[GivenMessages] | None
    """Since the turn before, in order; None if only the ids are known."""
    context: list[int]
    """Ids of the prompt that its segment did not have yet: all of them where the segment begins."""
    generation: Generation
    worked_seconds: float
    """Work time of the stage when the turn was recorded."""


def encode(turn: SavedTurn) -> bytes:
    """Encode a turn, in about 0.1 ms: encode many in a thread."""
    generation, extras = turn.generation, turn.generation.extras
    columns = {
        "context": np.array(turn.context, "<i4"),
        "output_ids": np.array(generation.output_ids, "<i4"),
        "logprobs": np.array(generation.logprobs, "<f8"),
        "versions": np.array(generation.versions, "<i8"),
    }
    if extras.routed_experts is not None:
        columns["routed_experts"] = np.ascontiguousarray(extras.routed_experts, "<i4")
    header = {
        "form": _FORM,
        "columns": {name: [array.dtype.str, list(array.shape)] for name, array in columns.items()},
        "given": None
        if turn.given is None
        else [[each.reason, _MESSAGES.dump_python(each.messages, mode="json")] for each in turn.given],
        "finish_reason": generation.finish_reason,
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "kept_kv_versions": sorted(generation.kept_kv_versions),
        "backend_id": generation.backend_id,
        "engine_seconds": generation.engine_seconds,
        "top_logprobs": extras.top_logprobs,
        "prompt_logprobs": extras.prompt_logprobs,
        "worked_seconds": turn.worked_seconds,
    }
    text = json.dumps(header).encode()
    parts = [_LENGTH.pack(len(text)), text, *(array.tobytes() for array in columns.values())]
    return zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(parts))


def decode(data: bytes) -> SavedTurn:
    """Decode a turn.

    Raises:
        UnreadableTurnError: The bytes are damaged, or have another form.
    """
    try:
        return _decode(data)
    except _UNREADABLE as error:
        raise UnreadableTurnError(f"a saved turn cannot be read: {type(error).__name__}: {error}") from error


def _decode(data: bytes) -> SavedTurn:
    raw = zstandard.ZstdDecompressor().decompress(data)
    (length,) = _LENGTH.unpack_from(raw)
    at = _LENGTH.size + length
    header: dict[str, Any] = json.loads(raw[_LENGTH.size : at])
    if header["form"] != _FORM:
        raise ValueError(f"it has form {header['form']!r}")
    columns: dict[str, NDArray[Any]] = {}
    for name, (dtype, shape) in header["columns"].items():
        count = int(np.prod(shape, dtype=np.int64))
        columns[name] = np.frombuffer(raw, np.dtype(dtype), count, at).reshape(shape)
        at += columns[name].nbytes
    return SavedTurn(
        given=header["given"]
        and [
            GivenMessages(_MESSAGES.validate_python(messages), reason and ForkReason(reason))
            for reason, messages in header["given"]
        ],
        context=columns["context"].tolist(),
        generation=Generation(
            output_ids=columns["output_ids"].tolist(),
            logprobs=columns["logprobs"].tolist(),
            versions=columns["versions"].tolist(),
            finish_reason=FinishReason(header["finish_reason"]),
            prompt_tokens=header["prompt_tokens"],
            cached_tokens=header["cached_tokens"],
            kept_kv_versions=frozenset(header["kept_kv_versions"]),
            backend_id=header["backend_id"],
            engine_seconds=header["engine_seconds"],
            extras=_extras(header["top_logprobs"], header["prompt_logprobs"], columns.get("routed_experts")),
        ),
        worked_seconds=header["worked_seconds"],
    )


def _extras(
    top: Sequence[Sequence[Sequence[Any]]] | None,
    prompt: list[float | None] | None,
    experts: NDArray[np.int32] | None,
) -> ReturnedExtras:
    if top is None and prompt is None and experts is None:
        return NOTHING_RETURNED
    likeliest = None if top is None else [[TopLogprob(*pair) for pair in row] for row in top]
    return ReturnedExtras(top_logprobs=likeliest, prompt_logprobs=prompt, routed_experts=experts)
