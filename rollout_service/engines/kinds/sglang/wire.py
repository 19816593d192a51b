"""SGLang's `/generate` as JSON: requests are written, and answers are checked before they are used.

An answer passes only if every sampled id has its own logprob and a version and is in the vocabulary, the counts agree
with the lists and the prompt, and everything that was asked for is there.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import (
    NO_EXTRAS,
    NOTHING_RETURNED,
    GenerateRequest,
    Generation,
    ModelInfo,
    ReturnedExtras,
    TopLogprob,
)
from rollout_service.engines.errors import BackendProtocolError
from rollout_service.engines.kinds import checks as check
from rollout_service.engines.kinds.checks import (
    ExtraKind,
    flat_experts,
    mapping,
    parse_version,
    routed_rows,
    unsupported,
)
from rollout_service.engines.kinds.http_backend import prompt_for_json

_OTHER_SERVER = "Check that this is the address of an SGLang server."


def generate_body(request: GenerateRequest, stream_interval: int | None = None) -> dict[str, Any]:
    """Set all that shapes the distribution, whatever the engine's defaults.

    With `stream_interval` the answer is streamed, in chunks of so many tokens.
    """
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        # With top_k 1, whether SGLang scales logprobs by the temperature depends on the rest of the batch. Greedy
        # sampling never scales them, and gives the same tokens.
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
    if sampling.json_schema is not None:
        parameters["json_schema"] = sampling.json_schema
    if stream_interval is not None:
        parameters["stream_interval"] = stream_interval
    return {
        "rid": request.request_id,
        "input_ids": prompt_for_json(request.input_ids),
        "sampling_params": parameters,
        "return_logprob": True,
        "logprob_start_len": _logprob_start(request),
        "stream": stream_interval is not None,
    } | _extra_fields(request)


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
        meta = mapping(body.get("meta_info"), "meta_info", _OTHER_SERVER)
        reason, matched = _finish(meta)
        output_ids = check.sampled_ids(
            body.get("output_ids"),
            name="output_ids",
            budget=request.sampling.max_new_tokens,
            vocab_size=info.vocab_size if info else None,
        )
        aborted, prompt_tokens = reason is FinishReason.ABORT, len(request.input_ids)
        for name, expected in (("completion_tokens", len(output_ids)), ("prompt_tokens", prompt_tokens)):
            check.expect_count(meta.get(name), f"meta_info.{name}", expected, required=not aborted)
        check.refuse_empty(output_ids, reason)
        return Generation(
            output_ids=output_ids,
            logprobs=token_logprobs(meta, output_ids),
            versions=token_versions(meta, len(output_ids)),
            finish_reason=reason,
            matched=matched,
            prompt_tokens=prompt_tokens,
            cached_tokens=check.cached_count(
                meta.get("cached_tokens"), "meta_info.cached_tokens", prompt_tokens, required=not aborted
            ),
            backend_id=backend_id,
            engine_seconds=engine_seconds,
            extras=_returned_extras(meta, request, output_ids, info) if output_ids else NOTHING_RETURNED,
        )


def _finish(meta: Mapping[str, Any]) -> tuple[FinishReason, int | str | None]:
    finish = mapping(meta.get("finish_reason"), "meta_info.finish_reason")
    reason = check.finish_reason(finish.get("type"), "meta_info.finish_reason.type")
    matched = finish.get("matched")
    return reason, matched if isinstance(matched, int | str) else None


def token_logprobs(meta: Mapping[str, Any], output_ids: list[int]) -> list[float]:
    entries = meta.get("output_token_logprobs")
    if entries is None and not output_ids:
        return []
    if not isinstance(entries, list):
        raise BackendProtocolError("output_token_logprobs is missing", hint=check.LOGPROBS_HINT)
    check.expect_length(entries, "output_token_logprobs", len(output_ids))
    if set(map(type, entries)) == {list} and min(map(len, entries)) > 1:
        values = [entry[0] for entry in entries]
        if [entry[1] for entry in entries] == output_ids and check.are_logprobs(values):
            return values
    return [
        check.logprob(_of_token(entry, token, f"logprob {i}"), f"logprob {i}")
        for i, (entry, token) in enumerate(zip(entries, output_ids, strict=True))
    ]


def _of_token(entry: object, token: int, where: str) -> object:
    """Return the logprob in a triple of logprob, id and text, which must be of `token`."""
    if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
        raise check.other_token(where, entry, token)
    return entry[0]


def token_versions(meta: Mapping[str, Any], count: int) -> list[int]:
    spans = meta.get("weight_versions")
    if spans is None:
        return [parse_version(meta.get("weight_version"))] * count
    return check.versions_of_spans(spans, count)


# ---- extras


def _logprob_start(request: GenerateRequest) -> int:
    """Return the token before the first whose logprob is wanted, since SGLang gives its first one none; -1 for none."""
    first = request.extras.prompt_logprobs_from
    return -1 if first is None or first == len(request.input_ids) else max(first - 1, 0)


def _extra_fields(request: GenerateRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.extras.top_logprobs:
        fields["top_logprobs_num"] = request.extras.top_logprobs
    if request.extras.routed_experts_from is not None:
        fields |= {
            "return_routed_experts": True,
            "routed_experts_start_len": request.extras.routed_experts_from,
        }
    return fields


def _returned_extras(
    meta: Mapping[str, Any],
    request: GenerateRequest,
    output_ids: Sequence[int],
    info: ModelInfo | None,
) -> ReturnedExtras:
    extras = request.extras
    if extras is NO_EXTRAS:
        return NOTHING_RETURNED
    return ReturnedExtras(
        top_logprobs=top_logprobs(meta, request, len(output_ids), info) if extras.top_logprobs else None,
        prompt_logprobs=_prompt_logprobs(meta, request) if extras.prompt_logprobs_from is not None else None,
        routed_experts=_routed_experts(meta, request, len(output_ids), info)
        if extras.routed_experts_from is not None
        else None,
    )


def top_logprobs(
    meta: Mapping[str, Any], request: GenerateRequest, count: int, info: ModelInfo | None
) -> list[list[TopLogprob]]:
    rows = meta.get("output_top_logprobs")
    if not isinstance(rows, list):
        raise unsupported(ExtraKind.TOP_LOGPROBS)
    return check.top_logprobs(
        [[_top_logprob(entry) for entry in row] if isinstance(row, list) else [] for row in rows],
        wanted=request.extras.top_logprobs,
        tokens=count,
        vocab_size=info.vocab_size if info else None,
    )


def _top_logprob(entry: object) -> TopLogprob:
    if not isinstance(entry, list) or len(entry) < 2:
        raise BackendProtocolError(f"an entry of output_top_logprobs is {entry!r}, not a logprob and an id")
    return TopLogprob(entry[1], -math.inf if entry[0] is None else entry[0])


def _prompt_logprobs(meta: Mapping[str, Any], request: GenerateRequest) -> list[float | None]:
    start = _logprob_start(request)
    if start < 0:
        return []
    tokens, entries = request.input_ids[start:], meta.get("input_token_logprobs")
    if not isinstance(entries, list):
        raise unsupported(ExtraKind.PROMPT_LOGPROBS)
    check.expect_length(entries, "input_token_logprobs", len(tokens))
    values = [
        _of_token(each, id_, f"prompt logprob {i}") for i, (each, id_) in enumerate(zip(entries, tokens, strict=True))
    ]
    known: list[float | None] = [check.logprob(value, "a logprob of the prompt") for value in values[1:]]
    return known if request.extras.prompt_logprobs_from else [None, *known]


def _routed_experts(
    meta: Mapping[str, Any], request: GenerateRequest, count: int, info: ModelInfo | None
) -> NDArray[np.int32]:
    encoded = meta.get("routed_experts")
    if encoded is None:
        raise unsupported(ExtraKind.ROUTED_EXPERTS)
    if info is None or info.routing_shape is None:
        raise unsupported(
            ExtraKind.ROUTED_EXPERTS,
            hint="Let this service read the engine's model folder, whose config.json has the numbers of layers and "
            "experts.",
        )
    return flat_experts(encoded, routed_rows(request, count), info.routing_shape)
