"""vLLM's token-in, token-out route as JSON: requests are written, and answers are checked before they are used.

An answer passes only if every sampled id has its own logprob and version and is in the vocabulary, the counts agree
with the lists, and everything that was asked for is there. The -9999.0 that vLLM writes for a missing logprob is
refused.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_service.engines.contract import (
    NO_EXTRAS,
    NOTHING_RETURNED,
    GenerateRequest,
    Generation,
    ModelInfo,
    ReturnedExtras,
    SamplingOptions,
    TopLogprob,
)
from rollout_service.engines.errors import BackendProtocolError, BackendRejected
from rollout_service.engines.kinds import checks as check
from rollout_service.engines.kinds.checks import ExtraKind, mapping, npy_experts, routed_rows, unsupported
from rollout_service.engines.kinds.http_backend import prompt_for_json

GENERATE = "/inference/v1/generate"
_ID_PREFIX = "generate-tokens-"  # the server puts this before the id that it was given
_NO_LOGPROB = -9999.0
_OTHER_SERVER = "Check that this is the address of a vLLM server."
_START_CACHED = "Start vLLM with --enable-prompt-tokens-details."


class LogprobsMode(StrEnum):
    """The distribution that a server's logprobs belong to, set by its `--logprobs-mode`."""

    RAW = "raw_logprobs"
    """The model's own: at temperature 1, over all tokens."""
    PROCESSED = "processed_logprobs"
    """The one that is sampled from: scaled by the temperature, over the tokens that top_k, top_p and min_p leave."""


def engine_request_id(request_id: str) -> str:
    return _ID_PREFIX + request_id


def generate_body(request: GenerateRequest, *, stream: bool = False) -> dict[str, Any]:
    """Set all that shapes the distribution, whatever the server's defaults."""
    sampling, extras = request.sampling, request.extras
    parameters: dict[str, Any] = {
        "n": 1,
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": 0,
        "temperature": 0.0 if is_greedy(sampling) else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": False,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        # The sampled token takes one of the places, whatever its rank.
        "logprobs": extras.top_logprobs + 1 if extras.top_logprobs else 0,
    }
    if sampling.seed is not None:
        parameters["seed"] = seed_at(sampling.seed, len(request.input_ids))
    if sampling.json_schema is not None:
        parameters["structured_outputs"] = {"json": sampling.json_schema}
    if extras.prompt_logprobs_from is not None:
        parameters["prompt_logprobs"] = 0
    if extras.routed_experts_from is not None:
        parameters["routed_experts_prompt_start"] = extras.routed_experts_from
    options = {"stream_options": {"include_usage": True}} if stream else {}
    return {
        "request_id": request.request_id,
        "token_ids": prompt_for_json(request.input_ids),
        "sampling_params": parameters,
        "stream": stream,
        **options,
    }


def seed_at(seed: int, position: int) -> int:
    """Return the seed of a request that samples from this position on.

    vLLM draws the same random numbers for each request with the same seed: with one for all, turns, and the parts of an
    interrupted answer, would not be independent of each other.
    """
    return int.from_bytes(blake2b(f"{seed}/{position}".encode(), digest_size=4).digest()) >> 1


def is_greedy(sampling: SamplingOptions) -> bool:
    return sampling.temperature == 0 or sampling.top_k == 1


def refuse_other_distribution(sampling: SamplingOptions, mode: LogprobsMode, backend_id: str) -> None:
    """Refuse options for which the server has no logprobs that are scaled by the temperature and over all tokens.

    Raises:
        BackendRejected: The server's mode gives the logprobs of another distribution.
    """
    if is_greedy(sampling):
        return
    is_restricted = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    is_scaled = sampling.temperature != 1
    if mode is LogprobsMode.PROCESSED and is_restricted:
        what = "after top_p, top_k and min_p, instead of over all tokens"
        hint = "Sample without them, or start vLLM with --logprobs-mode raw_logprobs and sample at temperature 1."
    elif mode is LogprobsMode.RAW and is_scaled:
        what = f"at temperature 1, instead of {sampling.temperature:g}"
        hint = "Sample at temperature 1, or start vLLM with --logprobs-mode processed_logprobs."
    else:
        return
    raise BackendRejected(f"computes logprobs {what}", hint=hint, backend_id=backend_id)


def mode_of(entry: object) -> LogprobsMode:
    """Return a server's mode, from the logprobs of a token sampled with `top_k` 1 and of the runner-up.

    With `top_k` 1 the processed distribution leaves nothing for the second token; the raw one always does.

    Raises:
        BackendProtocolError: The values are logits, or cannot be read.
    """
    fields = mapping(entry, "an entry of logprobs.content")
    rows = fields.get("top_logprobs")
    if not isinstance(rows, list) or len(rows) < 2:
        raise BackendProtocolError("top_logprobs of the probe has fewer than two tokens")
    first, second = (_value(row) for row in rows[:2])
    if second == _NO_LOGPROB and first == 0.0:
        return LogprobsMode.PROCESSED
    if second != _NO_LOGPROB and first <= 0.0 and second < 0.0:
        return LogprobsMode.RAW
    raise BackendProtocolError(
        f"returns {first} and {second} for the two likeliest tokens, which are not logprobs",
        hint="Start vLLM with --logprobs-mode processed_logprobs.",
    )


def only_choice(answer: object) -> Mapping[str, Any]:
    choices = mapping(answer, "the answer", _OTHER_SERVER).get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        raise BackendProtocolError("choices is not a list of one object", hint=_OTHER_SERVER)
    return mapping(choices[0], "choices[0]", _OTHER_SERVER)


def logprob_entries(choice: Mapping[str, Any]) -> list[Any]:
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        raise BackendProtocolError("logprobs.content is missing", hint=check.LOGPROBS_HINT)
    return content


def parse_generation(
    answer: object, request: GenerateRequest, backend_id: str, info: ModelInfo | None, engine_seconds: float
) -> Generation:
    """Check an answer to `generate_body(request)`.

    Raises:
        BackendProtocolError: A part of the answer is missing or contradicts the rest.
        ExtraUnsupported: The engine left out an extra that was asked for.
    """
    with check.answer_of(backend_id):
        body = mapping(answer, "the answer", _OTHER_SERVER)
        choice = only_choice(body)
        expect_request(body, request)
        reason = check.finish_reason(choice.get("finish_reason"), "finish_reason")
        output_ids = check.sampled_ids(
            choice.get("token_ids"),
            name="token_ids",
            budget=request.sampling.max_new_tokens,
            vocab_size=info.vocab_size if info else None,
        )
        usage, prompt_tokens = mapping(body.get("usage"), "usage"), len(request.input_ids)
        for name, expected in (("completion_tokens", len(output_ids)), ("prompt_tokens", prompt_tokens)):
            check.expect_count(usage.get(name), f"usage.{name}", expected, required=True)
        check.refuse_empty(output_ids, reason)
        matched = choice.get("stop_reason")
        return Generation(
            output_ids=output_ids,
            logprobs=token_logprobs(choice, output_ids),
            versions=_versions(choice, len(output_ids)),
            finish_reason=reason,
            matched=matched if isinstance(matched, int | str) else None,
            prompt_tokens=prompt_tokens,
            cached_tokens=_cached_tokens(usage, prompt_tokens),
            backend_id=backend_id,
            engine_seconds=engine_seconds,
            extras=_returned_extras(body, choice, request, output_ids, info) if output_ids else NOTHING_RETURNED,
        )


def expect_request(body: Mapping[str, Any], request: GenerateRequest) -> None:
    stated, expected = body.get("request_id"), engine_request_id(request.request_id)
    if stated != expected:
        raise BackendProtocolError(f"request_id is {stated!r}, but should be {expected!r}")


def token_logprobs(choice: Mapping[str, Any], output_ids: Sequence[int]) -> list[float]:
    if not output_ids:
        return []
    entries = logprob_entries(choice)
    check.expect_length(entries, "logprobs.content", len(output_ids))
    if set(map(type, entries)) == {dict}:
        values = [entry.get("logprob") for entry in entries]
        ids = [entry.get("token_id") for entry in entries]
        if ids == output_ids and _NO_LOGPROB not in values and check.are_logprobs(values):
            return values
    return [
        _own_logprob(entry, token, f"logprob {i}")
        for i, (entry, token) in enumerate(zip(entries, output_ids, strict=True))
    ]


def _own_logprob(entry: object, token: int, where: str) -> float:
    if not isinstance(entry, dict) or entry.get("token_id") != token:
        raise check.other_token(where, entry, token)
    return _real(entry.get("logprob"), where)


def _real(value: object, where: str) -> float:
    if value == _NO_LOGPROB:
        raise BackendProtocolError(f"{where} is {value}, which vLLM sends for a logprob that it does not have")
    return check.logprob(value, where)


def _value(row: object) -> float:
    value = mapping(row, "an entry of top_logprobs").get("logprob")
    if not isinstance(value, int | float):
        raise BackendProtocolError(f"a logprob of top_logprobs is {value!r}, which is not a number")
    return float(value)


def _versions(choice: Mapping[str, Any], count: int) -> list[int]:
    spans = choice.get("weight_versions")
    if spans is None and count:
        raise BackendProtocolError(
            "weight_versions is missing",
            hint="Use vLLM 0.32 or newer, which reports the version that sampled each token.",
        )
    return check.versions_of_spans(spans or [], count)


def _cached_tokens(usage: Mapping[str, Any], prompt_tokens: int) -> int:
    details = usage.get("prompt_tokens_details")
    name = "usage.prompt_tokens_details.cached_tokens"
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return check.cached_count(cached, name, prompt_tokens, required=True, hint=_START_CACHED)


# ---- extras


def _returned_extras(
    body: Mapping[str, Any],
    choice: Mapping[str, Any],
    request: GenerateRequest,
    output_ids: Sequence[int],
    info: ModelInfo | None,
) -> ReturnedExtras:
    extras, count = request.extras, len(output_ids)
    if extras is NO_EXTRAS:
        return NOTHING_RETURNED
    return ReturnedExtras(
        top_logprobs=top_logprobs(choice, extras.top_logprobs, count, info) if extras.top_logprobs else None,
        prompt_logprobs=_prompt_logprobs(body, request, extras.prompt_logprobs_from)
        if extras.prompt_logprobs_from is not None
        else None,
        routed_experts=_routed_experts(choice, routed_rows(request, count))
        if extras.routed_experts_from is not None
        else None,
    )


def top_logprobs(choice: Mapping[str, Any], wanted: int, count: int, info: ModelInfo | None) -> list[list[TopLogprob]]:
    rows = [
        _best(mapping(entry, "an entry of logprobs.content").get("top_logprobs"), wanted)
        for entry in logprob_entries(choice)
    ]
    size = info.vocab_size if info else None
    return check.top_logprobs(rows, wanted=wanted, tokens=count, vocab_size=size)


def _best(row: object, wanted: int) -> list[TopLogprob]:
    """Return the best `wanted` by logprob; the sampled token, listed first at any rank, may not be one of them."""
    if not isinstance(row, list):
        raise unsupported(ExtraKind.TOP_LOGPROBS)
    pairs = [_alternative(mapping(each, "an entry of top_logprobs")) for each in row]
    return sorted(pairs, key=lambda pair: pair.logprob, reverse=True)[:wanted]


def _alternative(row: Mapping[str, Any]) -> TopLogprob:
    is_impossible = row.get("logprob") in (None, _NO_LOGPROB)
    return TopLogprob(row.get("token_id", -1), -math.inf if is_impossible else _value(row))


def _prompt_logprobs(body: Mapping[str, Any], request: GenerateRequest, first: int) -> list[float | None]:
    rows = body.get("prompt_logprobs")
    if not isinstance(rows, list):
        raise unsupported(ExtraKind.PROMPT_LOGPROBS)
    check.expect_length(rows, "prompt_logprobs", len(request.input_ids))
    return [
        _of_prompt(row, token, first + i) if first + i else None
        for i, (row, token) in enumerate(zip(rows[first:], request.input_ids[first:], strict=True))
    ]


def _of_prompt(row: object, token: int, position: int) -> float:
    where = f"prompt logprob {position}"
    entry = mapping(row, where).get(str(token))
    if not isinstance(entry, dict):
        raise check.other_token(where, row, token)
    return _real(entry.get("logprob"), where)


def _routed_experts(choice: Mapping[str, Any], rows: int) -> NDArray[np.int32]:
    encoded = choice.get("routed_experts")
    if encoded is None:
        raise unsupported(ExtraKind.ROUTED_EXPERTS)
    return npy_experts(encoded, rows)
