"""Per-token extras of an engine's answer (top-k and prompt logprobs, routed experts), as the protocols send them.

Guarantees: an extra that was asked for is complete, with one entry per token, or the answer is refused: with
ExtraUnsupported if the engine leaves it out, with BackendProtocolError if it is wrong.
"""

import base64
import binascii
import io
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rollout_service.engines.contract import NO_EXTRAS, GenerateRequest, RequestedExtras
from rollout_service.engines.errors import BackendProtocolError, ExtraUnsupported


class ExtraKind(StrEnum):
    """One kind of extra."""

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
    """Return the error of an engine that does not return an extra."""
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
