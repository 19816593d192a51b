"""SGLang's `/generate` as JSON: how a request is written, and how an answer is checked before it is believed.

An answer passes only if every sampled id has its own logprob and a version, ids are in the vocabulary,
the counts that the engine states agree with the lists that it sent, and the prompt that it counted is
the one it was given.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_service.inference.contract import FinishReason, GenerateRequest, Generation
from rollout_service.inference.errors import BackendProtocolError

_UNSET_VERSION = "default"
_LOGPROB_SLACK = 1e-3  # a certain token's logprob may come out a little above zero in low precision


def generate_body(request: GenerateRequest) -> dict[str, Any]:
    """The body of `/generate`; it leaves nothing that shapes the distribution to the engine's defaults."""
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        # With top_k 1 SGLang scales logprobs by the temperature or does not, by what else is in the batch; greedily it
        # never does, and the tokens are the same.
        "temperature": 0.0 if sampling.top_k == 1 else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    return {
        "rid": request.request_id,
        "input_ids": list(request.input_ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }


def parse_version(raw: object) -> int:
    """The integer behind an engine's weight version; an engine that was never told one is at 0.

    Raises:
        BackendProtocolError: the version is a name.
    """
    if raw == _UNSET_VERSION:
        return 0
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    if isinstance(raw, str) and raw.isascii() and raw.isdigit():
        return int(raw)
    raise BackendProtocolError(
        f"weight version {raw!r} is not an integer",
        hint="Pass a whole number as weight_version when updating the engine's weights",
    )


def parse_generation(
    answer: object,
    request: GenerateRequest,
    *,
    backend_id: str,
    vocab_size: int | None,
    engine_seconds: float,
) -> Generation:
    """Check an answer to `generate_body(request)` and take what was sampled from it.

    Raises:
        BackendProtocolError: anything is missing or contradicts the rest.
    """
    try:
        return _parse(answer, request, backend_id, vocab_size, engine_seconds)
    except BackendProtocolError as error:
        raise BackendProtocolError(str(error), hint=error.hint, backend_id=backend_id) from error


def _parse(
    answer: object, request: GenerateRequest, backend_id: str, vocab_size: int | None, engine_seconds: float
) -> Generation:
    body = _mapping(answer, "the answer")
    meta = _mapping(body.get("meta_info"), "meta_info")
    reason, matched = _finish(meta)
    output_ids = _output_ids(body, vocab_size)
    aborted = reason is FinishReason.ABORT
    if len(output_ids) > request.sampling.max_new_tokens:
        raise BackendProtocolError(
            f"{len(output_ids)} tokens were sampled where at most {request.sampling.max_new_tokens} were asked for"
        )
    _expect_count(meta, "completion_tokens", len(output_ids), required=not aborted)
    _expect_count(meta, "prompt_tokens", len(request.input_ids), required=not aborted)
    if not output_ids and not aborted:
        raise BackendProtocolError(f"finished with {reason.value!r} but sampled nothing")
    return Generation(
        output_ids=output_ids,
        logprobs=_logprobs(meta, output_ids),
        versions=_versions(meta, len(output_ids)),
        finish_reason=reason,
        matched=matched,
        prompt_tokens=len(request.input_ids),
        cached_tokens=_cached_tokens(meta, len(request.input_ids), required=not aborted),
        backend_id=backend_id,
        engine_seconds=engine_seconds,
    )


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise BackendProtocolError(f"{what} is not a JSON object", hint="Is this an SGLang server?")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _finish(meta: Mapping[str, Any]) -> tuple[FinishReason, int | str | None]:
    finish = _mapping(meta.get("finish_reason"), "meta_info.finish_reason")
    kind = finish.get("type")
    if kind not in {reason.value for reason in FinishReason}:
        raise BackendProtocolError(f"finish_reason.type is {kind!r}, not stop, length or abort")
    matched = finish.get("matched")
    return FinishReason(kind), matched if isinstance(matched, int | str) else None


def _output_ids(body: Mapping[str, Any], vocab_size: int | None) -> list[int]:
    ids = body.get("output_ids")
    if not isinstance(ids, list):
        raise BackendProtocolError(
            "output_ids is missing", hint="Use an engine that returns the sampled ids beside their text"
        )
    limit = math.inf if vocab_size is None else vocab_size
    for position, token in enumerate(ids):
        if not _is_count(token) or token >= limit:
            raise BackendProtocolError(
                f"output id {token!r} at {position} is outside the vocabulary of {limit}"
            )
    return ids


def _expect_count(meta: Mapping[str, Any], name: str, expected: int, *, required: bool) -> None:
    stated = meta.get(name)
    if stated is None and not required:
        return
    if stated != expected:
        raise BackendProtocolError(f"meta_info.{name} is {stated!r} where {expected} is right")


def _logprobs(meta: Mapping[str, Any], output_ids: Sequence[int]) -> list[float]:
    entries = meta.get("output_token_logprobs")
    if entries is None and not output_ids:
        return []
    if not isinstance(entries, list):
        raise BackendProtocolError(
            "output_token_logprobs is missing", hint="The engine must return the logprobs of what it samples"
        )
    if len(entries) != len(output_ids):
        raise BackendProtocolError(f"{len(entries)} logprobs came with {len(output_ids)} tokens")
    return [
        _logprob(entry, token, i) for i, (entry, token) in enumerate(zip(entries, output_ids, strict=True))
    ]


def _logprob(entry: object, token: int, position: int) -> float:
    if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
        raise BackendProtocolError(f"logprob {position} is {entry!r}, which is not of the sampled id {token}")
    value = entry[0]
    if not isinstance(value, int | float) or not math.isfinite(value) or value > _LOGPROB_SLACK:
        raise BackendProtocolError(
            f"logprob {position} is {value!r}, which is not the logarithm of a probability"
        )
    return float(value)


def _versions(meta: Mapping[str, Any], count: int) -> list[int]:
    spans = meta.get("weight_versions")
    if spans is None:
        return [parse_version(meta.get("weight_version"))] * count
    versions: list[int] = []
    for span in spans if isinstance(spans, list) else [spans]:
        fields = _mapping(span, "an entry of weight_versions")
        start, end = fields.get("start"), fields.get("end")
        if start != len(versions) or not isinstance(end, int) or end < start:
            raise BackendProtocolError(f"weight_versions {spans!r} do not follow each other from 0")
        versions.extend([parse_version(fields.get("version"))] * (end - start))
    if len(versions) != count:
        raise BackendProtocolError(f"weight_versions cover {len(versions)} of {count} tokens")
    return versions


def _cached_tokens(meta: Mapping[str, Any], prompt_tokens: int, *, required: bool) -> int:
    cached: Any = meta.get("cached_tokens")
    if cached is None and not required:
        return 0
    if not _is_count(cached) or cached > prompt_tokens:
        raise BackendProtocolError(
            f"meta_info.cached_tokens is {cached!r} for a prompt of {prompt_tokens} tokens"
        )
    return int(cached)
