"""Limits of the size of an engine's answer: generous for the request, and at most `CEILING_BYTES`."""

from __future__ import annotations

from rollout_service.engines.contract import GenerateRequest, ModelInfo

CEILING_BYTES = 1 << 30
_BASE_BYTES = 1 << 20
_TOKEN_BYTES = 1_024
"""An id, its text, its log-probability and its version as JSON; several times what engines write."""
_CANDIDATE_BYTES = 256
"""One of the likeliest tokens with its log-probability."""
_EXPERT_BYTES = 16
"""One expert's number, in base64 or as JSON."""
_EXPERTS_A_TOKEN = 128 * 16
"""Layers and experts of a token of the largest models, used if the engine's model is unknown."""


def generation_bytes(request: GenerateRequest, info: ModelInfo | None) -> int:
    """Return how many bytes the answer to a request may take."""
    sampled, prompt, extras = request.sampling.max_new_tokens, len(request.input_ids), request.extras
    size = _BASE_BYTES + sampled * (_TOKEN_BYTES + extras.top_logprobs * _CANDIDATE_BYTES)
    if extras.prompt_logprobs_from is not None:
        size += prompt * (_TOKEN_BYTES + extras.top_logprobs * _CANDIDATE_BYTES)
    if extras.routed_experts_from is not None:
        shape = info.routing_shape if info is not None else None
        size += (prompt + sampled) * (shape[0] * shape[1] if shape else _EXPERTS_A_TOKEN) * _EXPERT_BYTES
    return min(size, CEILING_BYTES)
