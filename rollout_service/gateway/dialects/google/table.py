"""The parameters of Google's generateContent."""

from __future__ import annotations

import base64
import binascii

from rollout_service.gateway.dialects.fields import (
    FORCES_NOTHING,
    Parameter,
    ParameterTable,
    Treatment,
)

_HONORED, _RECORDED = Treatment.HONORED, Treatment.RECORDED
_IGNORED, _REFUSED = Treatment.IGNORED, Treatment.REFUSED


def _generation(name: str, treatment: Treatment, note: str = "", recorded_as: str = "") -> Parameter:
    return Parameter(f"generationConfig.{name}", treatment, note, recorded_as)


PARAMETERS = ParameterTable(
    (
        Parameter("contents", _HONORED),
        Parameter("systemInstruction", _HONORED),
        Parameter(
            "tools", _HONORED, "`functionDeclarations`; tools that Google runs are left out and counted"
        ),
        Parameter("toolConfig.functionCallingConfig", _RECORDED, FORCES_NOTHING),
        Parameter("toolConfig.retrievalConfig", _IGNORED),
        _generation("maxOutputTokens", _HONORED),
        _generation("stopSequences", _HONORED),
        _generation("candidateCount", _HONORED, "refused over 1 in a stream"),
        _generation("responseMimeType", _HONORED, "`application/json` without a schema is any object"),
        _generation("responseSchema", _HONORED, "such a turn is not trained on"),
        _generation("responseJsonSchema", _HONORED, "such a turn is not trained on"),
        _generation("responseModalities", _HONORED, "only `TEXT`"),
        _generation("temperature", _RECORDED, recorded_as="temperature"),
        _generation("topP", _RECORDED, recorded_as="top_p"),
        _generation("topK", _RECORDED, recorded_as="top_k"),
        _generation("seed", _RECORDED, recorded_as="seed"),
        _generation("presencePenalty", _RECORDED, recorded_as="presence_penalty"),
        _generation("frequencyPenalty", _RECORDED, recorded_as="frequency_penalty"),
        _generation("thinkingConfig", _RECORDED, recorded_as="thinking"),
        _generation("mediaResolution", _IGNORED),
        _generation("enableEnhancedCivicAnswers", _IGNORED),
        _generation("responseLogprobs", _REFUSED, "log-probabilities are in the trajectory"),
        _generation("logprobs", _REFUSED, "log-probabilities are in the trajectory"),
        _generation("speechConfig", _REFUSED, "the model writes text only"),
        Parameter("safetySettings", _IGNORED),
        Parameter("cachedContent", _REFUSED, "nothing is kept between requests; send the whole history"),
        Parameter("labels", _IGNORED),
        Parameter("model", _IGNORED, "the path names the model"),
    )
)


# Thought signatures: what clients send back unread. Ours hold the key of the turn, and the id of the call.


def sign(turn_key: str, call_id: str = "") -> str:
    """Return a signature; Google's clients require base64."""
    return base64.b64encode(f"{turn_key}.{call_id}".encode()).decode()


def read_signature(signature: str) -> tuple[str, str | None]:
    """Return the key of the turn and the id of the call; a signature of another service is a key of no turn."""
    try:
        text = base64.b64decode(signature, altchars=b"-_" if set("-_") & set(signature) else None).decode(
            "ascii"
        )
    except (binascii.Error, ValueError):
        return signature, None
    turn_key, _, call_id = text.partition(".")
    return turn_key, call_id or None
