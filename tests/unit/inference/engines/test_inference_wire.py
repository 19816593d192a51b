"""An engine's answer is believed whole or not at all."""

import copy
from array import array

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import GenerateRequest, ModelInfo, SamplingOptions, new_request_id
from rollout_service.engines.errors import BackendProtocolError
from rollout_service.engines.kinds.checks import parse_version
from rollout_service.engines.kinds.http_backend import dump_request, prompt_for_json
from rollout_service.engines.kinds.sglang.wire import generate_body, parse_generation
from tests.support.engines.answers import with_value

REQUEST = GenerateRequest(new_request_id(), [1, 2, 3], SamplingOptions(max_new_tokens=8))


def good_answer():
    return {
        "text": "x",
        "output_ids": [5, 6, 7],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 7},
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "cached_tokens": 2,
            "weight_version": "4",
            "output_token_logprobs": [[-0.1, 5, None], [-0.2, 6, None], [-0.3, 7, None]],
        },
    }


def info(vocab_size, routing_shape=None):
    return ModelInfo(
        model_path="m",
        tokenizer_path="m",
        weight_version=0,
        vocab_size=vocab_size,
        context_length=100,
        routing_shape=routing_shape,
    )


def parse(answer, request=REQUEST, vocab_size=10):
    return parse_generation(answer, request, backend_id="b", info=info(vocab_size), engine_seconds=0.5)


def test_a_good_answer_is_taken_as_it_is():
    generation = parse(good_answer())
    assert generation.output_ids == [5, 6, 7]
    assert generation.logprobs == [-0.1, -0.2, -0.3]
    assert generation.versions == [4, 4, 4]
    assert (generation.finish_reason, generation.matched) == (FinishReason.STOP, 7)
    assert (generation.prompt_tokens, generation.cached_tokens, generation.backend_id) == (3, 2, "b")


META = ("meta_info",)
LOGPROBS = (*META, "output_token_logprobs")
VERSIONS = (*META, "weight_versions")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("output_ids",), None, "output_ids is missing"),
        (("output_ids", 1), 10, "outside the vocabulary"),
        (("output_ids", 1), -1, "outside the vocabulary"),
        (("output_ids", 1), True, "outside the vocabulary"),
        (("output_ids", 1), "6", "outside the vocabulary"),
        (("output_ids",), [5] * 9, "at most 8"),
        (META, None, "meta_info"),
        ((*META, "finish_reason"), None, "finish_reason"),
        ((*META, "finish_reason", "type"), "tired", "tired"),
        ((*META, "prompt_tokens"), 4, "prompt_tokens is 4, but should be 3"),
        ((*META, "completion_tokens"), 2, "completion_tokens is 2, but should be 3"),
        ((*META, "cached_tokens"), None, "cached_tokens is None"),
        ((*META, "cached_tokens"), 4, "cached_tokens is 4"),
        ((*META, "weight_version"), None, "weight version None"),
        ((*META, "weight_version"), "step-4", "is not an integer"),
        (LOGPROBS, None, "output_token_logprobs is missing"),
        (LOGPROBS, [[-0.1, 5, None]], "output_token_logprobs has 1 entries for 3 tokens"),
        ((*LOGPROBS, 1, 1), 9, "does not belong to token 6"),
        ((*LOGPROBS, 1, 0), float("nan"), "must be a finite number of at most 0"),
        ((*LOGPROBS, 1, 0), float("-inf"), "must be a finite number of at most 0"),
        ((*LOGPROBS, 1, 0), 0.5, "must be a finite number of at most 0"),
        ((*LOGPROBS, 1, 0), "-0.2", "must be a finite number of at most 0"),
        (VERSIONS, [{"version": "4", "start": 0, "end": 2}], "covers 2 of 3"),
        (VERSIONS, [{"version": "4", "start": 1, "end": 3}], "must follow each other"),
        (VERSIONS, [{"version": "4", "start": 0, "end": 2**62}], "must follow each other from 0 to 3"),
    ],
)
def test_an_answer_with_a_flaw_is_refused_by_name(path, value, message):
    with pytest.raises(BackendProtocolError, match=message) as caught:
        parse(with_value(good_answer(), path, value))
    assert caught.value.backend_id == "b"


@pytest.mark.parametrize("answer", [None, [], "text", 3, {}])
def test_an_invalid_answer_is_refused(answer):
    with pytest.raises(BackendProtocolError) as caught:
        parse(answer)
    assert caught.value.hint == "Check that this is the address of an SGLang server."
    assert caught.value.backend_id == "b"


def test_an_abort_from_the_queue_may_leave_everything_out():
    meta = {"finish_reason": {"type": "abort", "message": "queue"}, "weight_version": "default"}
    generation = parse({"output_ids": [], "meta_info": meta})
    assert generation.finish_reason is FinishReason.ABORT
    assert generation.output_ids == generation.logprobs == generation.versions == []


def test_an_abort_with_tokens_needs_their_logprobs():
    answer = good_answer()
    answer["meta_info"]["finish_reason"] = {"type": "abort"}
    del answer["meta_info"]["output_token_logprobs"]
    with pytest.raises(BackendProtocolError, match="output_token_logprobs"):
        parse(answer)


def test_a_finished_turn_without_tokens_is_refused():
    answer = good_answer()
    answer["output_ids"] = []
    answer["meta_info"] |= {"completion_tokens": 0, "output_token_logprobs": []}
    with pytest.raises(BackendProtocolError, match="sampled nothing"):
        parse(answer)


@given(ends=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(sorted))
def test_versions_split_where_the_engine_says(ends):
    ends = [*ends, 3]
    spans = [
        {"version": str(version), "start": start, "end": end}
        for version, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    answer = good_answer()
    answer["meta_info"]["weight_versions"] = spans
    expected = [span["version"] for span in spans for _ in range(span["end"] - span["start"])]
    assert parse(answer).versions == [int(version) for version in expected]


@given(
    answer=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["output_ids", "meta_info", "finish_reason", "type"]), inner)
        ),
        max_leaves=8,
    )
)
def test_garbage_raises_nothing_but_a_protocol_error(answer):
    with pytest.raises(BackendProtocolError):
        parse(copy.deepcopy(answer))


@pytest.mark.parametrize(("raw", "version"), [("default", 0), ("0", 0), ("17", 17), (3, 3)])
def test_versions_are_whole_numbers(raw, version):
    assert parse_version(raw) == version


@pytest.mark.parametrize("raw", [None, "", "v1", "1.0", "-1", -1, True, 1.0, "\u0663", "9" * 5_000])
def test_other_versions_are_refused(raw):
    with pytest.raises(BackendProtocolError) as caught:
        parse_version(raw)
    assert "whole number" in caught.value.hint


def test_the_request_leaves_no_sampling_parameter_to_the_engine():
    parameters = generate_body(REQUEST)["sampling_params"]
    assert parameters["top_k"] == -1
    assert parameters["top_p"] == parameters["temperature"] == parameters["repetition_penalty"] == 1.0
    assert parameters["min_p"] == parameters["frequency_penalty"] == parameters["presence_penalty"] == 0.0
    assert parameters["no_stop_trim"] is True
    assert parameters["skip_special_tokens"] is parameters["spaces_between_special_tokens"] is False
    assert "sampling_seed" not in parameters


def test_the_request_asks_for_the_logprobs_of_the_output_alone():
    body = generate_body(REQUEST)
    assert (body["return_logprob"], body["logprob_start_len"], body["stream"]) == (True, -1, False)
    assert body["rid"] == REQUEST.request_id
    assert body["input_ids"] == [1, 2, 3]


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"top_k": -2},
        {"min_p": 1.5},
    ],
)
def test_impossible_sampling_is_refused_before_it_is_sent(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingOptions(**bad)


@pytest.mark.parametrize("request_id", ["", "r1", "A" * 32, "0" * 31, "0" * 32 + "-1"])
def test_request_ids_have_one_length_so_that_none_is_a_prefix_of_another(request_id):
    with pytest.raises(ValueError, match="new_request_id"):
        GenerateRequest(request_id, [1])


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="empty"):
        GenerateRequest(new_request_id(), [])


IDS = [0, 7, 151_935, 2**31 - 1]


@pytest.mark.parametrize("kind", [list, tuple, lambda ids: array("i", ids), lambda ids: array("q", ids)])
def test_a_prompt_is_the_same_json_in_every_form(kind):
    body = dump_request({"input_ids": prompt_for_json(kind(IDS)), "stream": False})
    assert body == orjson.dumps({"input_ids": IDS, "stream": False})
