"""Checks of engines' answers, whatever the protocol.

Each function returns the value in the project's terms or raises BackendProtocolError: nothing is padded or repaired. An
extra that was asked for is complete, with one entry per token, or the answer is refused: with ExtraUnsupported if the
engine leaves it out.
"""

import base64
import binascii
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import NO_EXTRAS, GenerateRequest, RequestedExtras, TopLogprob
from rollout_service.engines.errors import BackendProtocolError, ExtraUnsupported, InferenceError

LOGPROBS_HINT = "Use an engine that returns the logprobs of the tokens that it samples."
_UNSET_VERSION = "default"
_REASONS: Mapping[object, FinishReason] = {reason.value: reason for reason in FinishReason}
_VERSION_DIGITS = 19  # as many as the largest that can be recorded
_LOGPROB_SLACK = 1e-3  # a certain token's logprob may come out a little above zero in low precision


@contextmanager
def answer_of(backend_id: str) -> Iterator[None]:
    """Add the backend's id to inference errors raised inside; their type, hint and context stay."""
    try:
        yield
    except InferenceError as error:
        if error.backend_id:
            raise
        named = type(error)(str(error), hint=error.hint, backend_id=backend_id, context=error.context)
        raise named from error


def mapping(value: object, what: str, hint: str = "") -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BackendProtocolError(f"{what} is not a JSON object", hint=hint)
    return value


def finish_reason(value: object, name: str) -> FinishReason:
    reason = _REASONS.get(value) if isinstance(value, str) else None
    if reason is None:
        raise BackendProtocolError(f"{name} is {value!r}, not stop, length or abort")
    return reason


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def sampled_ids(ids: object, *, name: str, budget: int, vocab_size: int | None) -> list[int]:
    """Return the sampled ids: at most `budget`, each in the vocabulary."""
    if not isinstance(ids, list):
        raise BackendProtocolError(
            f"{name} is missing", hint="Use an engine that returns the sampled ids, not only text."
        )
    limit = math.inf if vocab_size is None else vocab_size
    # All at once first, which takes a tenth of the time.
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= limit:
        for position, token in enumerate(ids):
            if not is_count(token) or token >= limit:
                raise BackendProtocolError(f"output id {token!r} at {position} is outside the vocabulary of {limit}")
    if len(ids) > budget:
        raise BackendProtocolError(f"{name} has {len(ids)} tokens, but at most {budget} were asked for")
    return ids


def refuse_empty(ids: Sequence[int], reason: FinishReason) -> None:
    """Refuse an answer without tokens, unless the request was aborted."""
    if not ids and reason is not FinishReason.ABORT:
        raise BackendProtocolError(f"finished with {reason.value!r} but sampled nothing")


def expect_length(entries: Sequence[object], name: str, expected: int) -> None:
    if len(entries) != expected:
        raise BackendProtocolError(f"{name} has {len(entries)} entries for {expected} tokens")


def other_token(where: str, entry: object, token: int) -> BackendProtocolError:
    return BackendProtocolError(f"{where} is {entry!r}, which does not belong to token {token}")


def expect_count(stated: object, name: str, expected: int, *, required: bool) -> None:
    if stated is None and not required:
        return
    if stated != expected:
        raise BackendProtocolError(f"{name} is {stated!r}, but should be {expected}")


def cached_count(cached: Any, name: str, prompt_tokens: int, *, required: bool, hint: str = "") -> int:
    if cached is None and not required:
        return 0
    if not is_count(cached) or cached > prompt_tokens:
        raise BackendProtocolError(f"{name} is {cached!r} for a prompt of {prompt_tokens} tokens", hint=hint)
    return int(cached)


def are_logprobs(values: Sequence[object]) -> bool:
    """`logprob` explains a single failure."""
    if set(map(type, values)) != {float}:
        return False
    numbers = cast(Sequence[float], values)
    return all(map(math.isfinite, numbers)) and max(numbers) <= _LOGPROB_SLACK


def logprob(value: object, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value > _LOGPROB_SLACK:  # type: ignore[arg-type, operator]
        raise BackendProtocolError(f"{where} is {value!r}, but must be a finite number of at most 0")
    return float(value)  # type: ignore[arg-type]


def top_logprobs(
    rows: Sequence[Sequence[TopLogprob]], *, wanted: int, tokens: int, vocab_size: int | None
) -> list[list[TopLogprob]]:
    """Return the likeliest tokens at each of `tokens` positions: `wanted` distinct ones, best first.

    Tokens that cannot be sampled are left out: those whose logprob is minus infinity, which JSON writes as null.
    """
    expect_length(rows, "top_logprobs", tokens)
    limit = math.inf if vocab_size is None else vocab_size
    expected = min(wanted, limit)
    found = []
    for position, row in enumerate(rows):
        if not all(is_count(each.token_id) and each.token_id < limit for each in row):
            raise BackendProtocolError(
                f"top_logprobs has a token at {position} that is outside the vocabulary of {limit}"
            )
        ids = {each.token_id for each in row}
        if len(row) != expected or len(ids) != len(row):
            raise BackendProtocolError(
                f"top_logprobs has {len(ids)} tokens at {position}, but {expected} were asked for"
            )
        possible = _possible(row)
        values = [logprob(each.logprob, f"a logprob of top_logprobs at {position}") for each in possible]
        if values != sorted(values, reverse=True):
            raise BackendProtocolError(f"top_logprobs at {position} does not begin with the likeliest token")
        found.append(possible)
    return found


def _possible(row: Sequence[TopLogprob]) -> list[TopLogprob]:
    """Leave out the tokens at a row's end that cannot be sampled; one of them is always possible."""
    end = len(row)
    while end > 1 and row[end - 1].logprob == -math.inf:
        end -= 1
    return list(row[:end])


def parse_version(raw: object) -> int:
    """Return an engine's weight version; an engine that was never given one is at 0."""
    if raw == _UNSET_VERSION:
        return 0
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    if isinstance(raw, str) and raw.isascii() and raw.isdigit() and len(raw) <= _VERSION_DIGITS:
        return int(raw)
    raise BackendProtocolError(
        f"weight version {raw!r:.80} is not an integer that can be recorded",
        hint="Pass a whole number as weight_version when you update the engine's weights.",
    )


def versions_of_spans(spans: object, count: int) -> list[int]:
    """Return the version of each of `count` tokens from spans `{version, start, end}` that cover them in order."""
    versions: list[int] = []
    for span in spans if isinstance(spans, list) else [spans]:
        fields = mapping(span, "an entry of weight_versions")
        start, end = fields.get("start"), fields.get("end")
        if start != len(versions) or not isinstance(end, int) or not start <= end <= count:
            raise BackendProtocolError(
                f"weight_versions is {spans!r:.200}, whose spans must follow each other from 0 to {count}"
            )
        versions.extend([parse_version(fields.get("version"))] * (end - start))
    if len(versions) != count:
        raise BackendProtocolError(f"weight_versions covers {len(versions)} of {count} tokens")
    return versions


class ExtraKind(StrEnum):
    TOP_LOGPROBS = "top_logprobs"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ROUTED_EXPERTS = "routed_experts"


_HINTS = {
    ExtraKind.TOP_LOGPROBS: "Leave exports.top_logprobs out, or use SGLang or vLLM.",
    ExtraKind.PROMPT_LOGPROBS: "Leave exports.prompt_logprobs out, or use SGLang or vLLM.",
    ExtraKind.ROUTED_EXPERTS: "Leave exports.routed_experts out, or serve a mixture of experts with the engine's "
    "--enable-return-routed-experts, from a folder that this service can read, and register it again.",
}


def wanted(extras: RequestedExtras) -> frozenset[ExtraKind]:
    if extras == NO_EXTRAS:  # as of most requests
        return frozenset()
    kinds = {
        ExtraKind.TOP_LOGPROBS: extras.top_logprobs > 0,
        ExtraKind.PROMPT_LOGPROBS: extras.prompt_logprobs_from is not None,
        ExtraKind.ROUTED_EXPERTS: extras.routed_experts_from is not None,
    }
    return frozenset(kind for kind, is_wanted in kinds.items() if is_wanted)


def unsupported(kind: ExtraKind, *, hint: str = "", backend_id: str = "") -> ExtraUnsupported:
    return ExtraUnsupported(
        f"does not return {kind.value}",
        hint=hint or _HINTS[kind],
        backend_id=backend_id,
        context={"export": kind.value},
    )


def routed_rows(request: GenerateRequest, sampled: int) -> int:
    """Return for how many tokens an answer with `sampled` tokens has experts."""
    return len(request.input_ids) + sampled - 1 - (request.extras.routed_experts_from or 0)


def flat_experts(encoded: object, rows: int, shape: tuple[int, int]) -> NDArray[np.int32]:
    """Decode experts from the base64 of little-endian int32: `rows` times `shape`, layers and experts per token."""
    raw, count = _decoded(encoded), max(rows, 0)
    if len(raw) != 4 * count * shape[0] * shape[1]:
        raise BackendProtocolError(
            f"routed_experts has {len(raw)} bytes for {rows} tokens, {shape[0]} layers and {shape[1]} experts each"
        )
    return _checked(np.frombuffer(raw, dtype="<i4").reshape(count, *shape))


def npy_experts(encoded: object, rows: int) -> NDArray[np.int32]:
    """Decode experts from the base64 of a `.npy` file with an integer array `[rows, layers, experts per token]`."""
    try:
        values = np.load(io.BytesIO(_decoded(encoded)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise BackendProtocolError(f"routed_experts is not an array: {error}") from error
    if values.ndim != 3 or values.shape[0] != rows or values.dtype.kind not in "iu":
        raise BackendProtocolError(f"routed_experts has the shape {values.shape} for {rows} tokens")
    return _checked(values)


def _decoded(encoded: object) -> bytes:
    if not isinstance(encoded, str):
        raise BackendProtocolError("routed_experts is not base64")
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise BackendProtocolError(f"routed_experts is not base64: {error}") from error


def _checked(values: NDArray[np.integer]) -> NDArray[np.int32]:
    if values.size and values.min() < 0:
        raise BackendProtocolError("routed_experts has a negative number")
    return values.astype(np.int32)
