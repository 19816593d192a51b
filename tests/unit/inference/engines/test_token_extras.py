"""Token extras have one entry per token, on the wire and across interruptions, or there is a typed error."""

import base64
import copy
import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import (
    GenerateRequest,
    ModelInfo,
    RequestedExtras,
    ReturnedExtras,
    SamplingOptions,
    TopLogprob,
    new_request_id,
)
from rollout_service.engines.errors import BackendProtocolError, ExtraUnsupported
from rollout_service.engines.kinds.sglang import wire as sglang_wire
from rollout_service.engines.kinds.vllm import wire as vllm_wire
from rollout_service.engines.pool.continuation import Continuation
from tests.support.samples import generation

LAYERS, WIDTH = 2, 3
INFO = ModelInfo(
    model_path="m",
    tokenizer_path="m",
    weight_version=0,
    vocab_size=50,
    context_length=100,
    routing_shape=(LAYERS, WIDTH),
)
EXPORTS = RequestedExtras(top_logprobs=2, prompt_logprobs_from=1, routed_experts_from=1)
REQUEST = GenerateRequest(new_request_id(), [1, 2, 3], SamplingOptions(max_new_tokens=8), EXPORTS)
ROWS = 3  # 3 prompt tokens and 2 sampled ones, without the first and the last


def experts(rows=ROWS):
    return np.arange(rows * LAYERS * WIDTH, dtype="<i4").reshape(rows, LAYERS, WIDTH)


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def sglang_answer():
    return {
        "output_ids": [5, 6],
        "meta_info": {
            "finish_reason": {"type": "length"},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "weight_version": "4",
            "output_token_logprobs": [[-0.5, 5, None], [-0.6, 6, None]],
            "output_top_logprobs": [[[-0.5, 5, None], [-1.5, 7, None]], [[-0.1, 8, None], [-0.6, 6, None]]],
            "input_token_logprobs": [[None, 1, None], [-0.25, 2, None], [-0.75, 3, None]],
            "routed_experts": base64.b64encode(experts().tobytes()).decode(),
        },
    }


def vllm_answer():
    def row(token, logprob, *others):
        rows = [{"token_id": token, "logprob": logprob}, *({"token_id": i, "logprob": v} for i, v in others)]
        return rows[0] | {"top_logprobs": rows}

    return {
        "request_id": f"generate-tokens-{REQUEST.request_id}",
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "prompt_logprobs": [
            None,
            {"2": {"logprob": -0.25}, "9": {"logprob": -0.1}},
            {"3": {"logprob": -0.75}},
        ],
        "choices": [
            {
                "token_ids": [5, 6],
                "finish_reason": "length",
                "stop_reason": None,
                "weight_versions": [{"version": "4", "start": 0, "end": 2}],
                "logprobs": {
                    "content": [
                        row(5, -0.5, (7, -1.5), (9, -2.5)),
                        row(6, -0.6, (8, -0.1), (9, -0.7)),
                    ]
                },
                "routed_experts": npy(experts().astype(np.uint8)),
            }
        ],
    }


WIRES = {"sglang": (sglang_wire, sglang_answer), "vllm": (vllm_wire, vllm_answer)}
wires = pytest.mark.parametrize("wire", WIRES)


def parse(wire, answer, info=INFO, request=REQUEST):
    return WIRES[wire][0].parse_generation(answer, request, backend_id="b", info=info, engine_seconds=0.5)


META, CHOICE = ("meta_info",), ("choices", 0)


@wires
def test_requested_extras_have_the_projects_names(wire):
    extras = parse(wire, WIRES[wire][1]()).extras
    assert extras.top_logprobs == [
        [TopLogprob(5, -0.5), TopLogprob(7, -1.5)],
        [TopLogprob(8, -0.1), TopLogprob(6, -0.6)],
    ]
    assert extras.prompt_logprobs == [-0.25, -0.75]
    assert extras.routed_experts.dtype == np.int32
    np.testing.assert_array_equal(extras.routed_experts, experts())


@pytest.mark.parametrize(
    ("wire", "path", "value"),
    [
        ("sglang", (*META, "output_top_logprobs", 0, 1, 0), None),
        ("vllm", (*CHOICE, "logprobs", "content", 0, "top_logprobs", 1, "logprob"), None),
        ("vllm", (*CHOICE, "logprobs", "content", 0, "top_logprobs", 1, "logprob"), -9999.0),
    ],
)
def test_an_alternative_that_cannot_be_sampled_is_left_out(wire, path, value):
    answer = WIRES[wire][1]()
    if wire == "vllm":  # which lists the sampled token first, and more of them than were asked for
        del answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][2:]
    extras = parse(wire, edited(answer, path, lambda _: value)).extras
    assert extras.top_logprobs == [
        [TopLogprob(5, -0.5)],
        [TopLogprob(8, -0.1), TopLogprob(6, -0.6)],
    ]


@wires
def test_extras_that_were_not_requested_are_none(wire):
    plain = GenerateRequest(REQUEST.request_id, REQUEST.input_ids, REQUEST.sampling)
    assert parse(wire, WIRES[wire][1](), request=plain).extras == ReturnedExtras()


def edited(answer, path, change):
    answer = copy.deepcopy(answer)
    *parents, last = path
    place = answer
    for part in parents:
        place = place[part]
    place[last] = change(place[last])
    return answer


def shorter(value):
    return value[:-1]


def nothing(_):
    return None


FLAWS = [
    ("sglang", (*META, "output_top_logprobs"), shorter, "top_logprobs has 1 entries for 2 tokens"),
    ("sglang", (*META, "output_top_logprobs", 1), shorter, "top_logprobs has 1 tokens at 1, but 2"),
    ("sglang", (*META, "output_top_logprobs", 0, 0, 1), lambda _: 50, "outside the vocabulary"),
    ("sglang", (*META, "output_top_logprobs", 0, 0, 0), lambda _: -3.0, "does not begin with the likeliest"),
    ("sglang", (*META, "output_top_logprobs", 0, 0, 0), nothing, "must be a finite number"),
    ("sglang", (*META, "input_token_logprobs"), shorter, "input_token_logprobs has 2 entries for 3 tokens"),
    ("sglang", (*META, "input_token_logprobs", 1, 1), lambda _: 9, "does not belong to token 2"),
    ("sglang", (*META, "input_token_logprobs", 1, 0), nothing, "must be a finite number"),
    ("sglang", (*META, "routed_experts"), lambda _: "AAAA", "routed_experts has 3 bytes for 3 tokens"),
    ("sglang", (*META, "routed_experts"), lambda _: "?", "not base64"),
    (
        "vllm",
        (*CHOICE, "logprobs", "content", 1, "top_logprobs"),
        lambda _: [],
        "top_logprobs has 0 tokens at 1",
    ),
    ("vllm", (*CHOICE, "logprobs", "content", 0, "top_logprobs", 1, "token_id"), lambda _: 50, "outside"),
    ("vllm", (*CHOICE, "logprobs", "content", 0, "top_logprobs", 1, "logprob"), lambda _: "x", "is 'x'"),
    ("vllm", ("prompt_logprobs",), shorter, "prompt_logprobs has 2 entries for 3 tokens"),
    (
        "vllm",
        ("prompt_logprobs", 1),
        lambda _: {"9": {"logprob": -1.0}},
        "prompt logprob 1 is .*, which does not belong to token 2",
    ),
    ("vllm", ("prompt_logprobs", 1, "2", "logprob"), lambda _: -9999.0, "does not have"),
    ("vllm", (*CHOICE, "routed_experts"), lambda _: npy(experts(rows=2)), "for 3 tokens"),
    ("vllm", (*CHOICE, "routed_experts"), lambda _: npy(np.zeros((ROWS, 2, 2))), "for 3 tokens"),
    ("vllm", (*CHOICE, "routed_experts"), lambda _: npy(-1 - experts()), "negative"),
    ("vllm", (*CHOICE, "routed_experts"), lambda _: base64.b64encode(b"no").decode(), "not an array"),
]


@pytest.mark.parametrize(("wire", "path", "change", "message"), FLAWS)
def test_a_flaw_is_refused_by_name(wire, path, change, message):
    with pytest.raises(BackendProtocolError, match=message):
        parse(wire, edited(WIRES[wire][1](), path, change))


@pytest.mark.parametrize(
    ("wire", "path", "kind"),
    [
        ("sglang", (*META, "output_top_logprobs"), "top_logprobs"),
        ("sglang", (*META, "input_token_logprobs"), "prompt_logprobs"),
        ("sglang", (*META, "routed_experts"), "routed_experts"),
        ("vllm", (*CHOICE, "logprobs", "content", 0, "top_logprobs"), "top_logprobs"),
        ("vllm", ("prompt_logprobs",), "prompt_logprobs"),
        ("vllm", (*CHOICE, "routed_experts"), "routed_experts"),
    ],
)
def test_an_engine_that_leaves_it_out_is_named_as_one_that_does_not_return_it(wire, path, kind):
    with pytest.raises(ExtraUnsupported, match=f"does not return {kind}") as caught:
        parse(wire, edited(WIRES[wire][1](), path, nothing))
    assert (caught.value.backend_id, caught.value.context["export"]) == ("b", kind)
    assert caught.value.hint.startswith(f"Leave exports.{kind} out, or ")


def test_routed_experts_need_a_model_folder_that_tells_their_shape():
    info = ModelInfo(model_path="m", tokenizer_path="m", weight_version=0, vocab_size=50, context_length=100)
    with pytest.raises(ExtraUnsupported) as caught:
        parse("sglang", sglang_answer(), info=info)
    assert "config.json" in caught.value.hint


# ---- across interruptions


def prompt_logprob(position):
    return None if position == 0 else -1.0 - position


def figures(request, count, version):
    """Return an engine's extras, known for each position except for the version that computed them."""
    start, extras = len(request.input_ids), request.extras
    if not count:
        return ReturnedExtras()
    first = extras.prompt_logprobs_from
    rows = range(extras.routed_experts_from or 0, start + count - 1)
    return ReturnedExtras(
        top_logprobs=[[TopLogprob(position, -0.5)] for position in range(start, start + count)]
        if extras.top_logprobs
        else None,
        prompt_logprobs=None if first is None else [prompt_logprob(i) for i in range(first, start)],
        routed_experts=None
        if extras.routed_experts_from is None
        else np.array([[[row, version]] for row in rows], np.int32).reshape(-1, 1, 2),
    )


@given(
    budget=st.integers(1, 40),
    prompt=st.integers(1, 15),
    cuts=st.lists(st.integers(0, 15), max_size=8),
    firsts=st.tuples(st.integers(0, 15), st.integers(0, 15)),
)
def test_any_interruptions_give_the_exports_of_one_generation(budget, prompt, cuts, firsts):
    first_prompt, first_routed = (min(first, prompt) for first in firsts)
    extras = RequestedExtras(top_logprobs=1, prompt_logprobs_from=first_prompt, routed_experts_from=first_routed)
    request = GenerateRequest(new_request_id(), [3] * prompt, SamplingOptions(max_new_tokens=budget), extras)
    continuation, whole = Continuation(request), None
    for version, cut in enumerate([*cuts, budget]):
        attempt = continuation.next_request()
        size = min(cut, attempt.sampling.max_new_tokens)
        whole = continuation.add(
            generation(
                [3] * size,
                versions=[version] * size,
                finish_reason=FinishReason.LENGTH if version == len(cuts) else FinishReason.ABORT,
                prompt_tokens=len(attempt.input_ids),
                extras=figures(attempt, size, version),
            )
        )
        if whole is not None:
            break
    extras = whole.extras
    assert extras.top_logprobs == [[TopLogprob(prompt + i, -0.5)] for i in range(budget)]
    assert extras.prompt_logprobs == [prompt_logprob(i) for i in range(first_prompt, prompt)]
    rows = extras.routed_experts
    assert rows[:, 0, 0].tolist() == list(range(first_routed, prompt + budget - 1))
    # The weights that sample a token also read the token just before it.
    sampled_by = dict(zip(range(prompt - 1, prompt + budget - 1), whole.versions, strict=True))
    assert all(sampled_by.get(row, whole.versions[0]) == version for row, version in rows[:, 0].tolist())
