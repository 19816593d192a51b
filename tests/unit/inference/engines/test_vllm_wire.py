"""A vLLM answer is believed whole or not at all, and a server's modes and gauges are read correctly."""

import re

import pytest

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import GenerateRequest, ModelInfo, SamplingOptions, new_request_id
from rollout_service.engines.errors import BackendProtocolError, BackendRejected
from rollout_service.engines.kinds.vllm.metrics import parse_load
from rollout_service.engines.kinds.vllm.wire import (
    LogprobsMode,
    generate_body,
    mode_of,
    parse_generation,
    refuse_other_distribution,
)
from tests.support.engines.answers import with_value

REQUEST = GenerateRequest(new_request_id(), [1, 2, 3], SamplingOptions(max_new_tokens=8))
INFO = ModelInfo(model_path="m", tokenizer_path="m", weight_version=0, vocab_size=10, context_length=100)


def good_answer():
    return {
        "request_id": f"generate-tokens-{REQUEST.request_id}",
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
        "choices": [
            {
                "token_ids": [5, 6, 7],
                "finish_reason": "stop",
                "stop_reason": 7,
                "logprobs": {
                    "content": [{"token_id": id_, "logprob": -id_ / 10} for id_ in (5, 6, 7)],
                },
                "weight_versions": [
                    {"version": "default", "start": 0, "end": 1},
                    {"version": "4", "start": 1, "end": 3},
                ],
            }
        ],
    }


def parse(answer):
    return parse_generation(answer, REQUEST, backend_id="b", info=INFO, engine_seconds=0.5)


def test_a_good_answer_is_taken_as_it_is():
    generation = parse(good_answer())
    assert generation.output_ids == [5, 6, 7]
    assert generation.logprobs == [-0.5, -0.6, -0.7]
    assert generation.versions == [0, 4, 4]
    assert (generation.finish_reason, generation.matched) == (FinishReason.STOP, 7)
    assert (generation.prompt_tokens, generation.cached_tokens, generation.backend_id) == (3, 2, "b")


def test_an_abort_before_the_first_token_is_whole():
    answer = good_answer()
    answer["choices"][0] |= {"token_ids": [], "finish_reason": "abort", "logprobs": {"content": []}}
    answer["choices"][0]["weight_versions"] = []
    answer["usage"]["completion_tokens"] = 0
    generation = parse(answer)
    assert (generation.finish_reason, generation.output_ids) == (FinishReason.ABORT, [])


def test_with_a_seed_neither_turns_nor_parts_of_an_answer_draw_the_same_random_numbers():
    def seed_of(prompt, seed):
        sampling = SamplingOptions(max_new_tokens=8, seed=seed)
        return generate_body(GenerateRequest(new_request_id(), prompt, sampling))["sampling_params"].get("seed")

    assert seed_of([1, 2], 7) == seed_of([3, 4], 7)
    assert len({seed_of([1] * length, seed) for length in (1, 2, 3) for seed in (7, 8)}) == 6
    assert seed_of([1], None) is None


CHOICE = ("choices", 0)
CONTENT = (*CHOICE, "logprobs", "content")
CACHED = ("usage", "prompt_tokens_details")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("choices",), [], "choices is not a list of one object"),
        (("request_id",), "generate-tokens-other", "request_id is 'generate-tokens-other', but should be"),
        ((*CHOICE, "token_ids"), None, "token_ids is missing"),
        ((*CHOICE, "token_ids", 1), 10, "outside the vocabulary"),
        ((*CHOICE, "token_ids", 1), -1, "outside the vocabulary"),
        ((*CHOICE, "token_ids"), [5] * 9, "at most 8"),
        ((*CHOICE, "token_ids"), [], "completion_tokens is 3, but should be 0"),
        ((*CHOICE, "finish_reason"), "error", "'error', not stop"),
        ((*CHOICE, "finish_reason"), None, "None, not stop"),
        ((*CHOICE, "logprobs"), None, "logprobs.content is missing"),
        (CONTENT, [{"token_id": 5, "logprob": -0.5}], "logprobs.content has 1 entries for 3 tokens"),
        ((*CONTENT, 1, "token_id"), 9, "does not belong to token 6"),
        ((*CONTENT, 1, "logprob"), None, "must be a finite number of at most 0"),
        ((*CONTENT, 1, "logprob"), float("nan"), "must be a finite number of at most 0"),
        ((*CONTENT, 1, "logprob"), 0.5, "must be a finite number of at most 0"),
        ((*CONTENT, 1, "logprob"), "-0.5", "must be a finite number of at most 0"),
        ((*CONTENT, 1, "logprob"), -9999.0, "does not have"),
        ((*CHOICE, "weight_versions"), None, "weight_versions is missing"),
        ((*CHOICE, "weight_versions", 1, "start"), 2, "must follow each other"),
        ((*CHOICE, "weight_versions", 1, "end"), 2, "covers 2 of 3"),
        ((*CHOICE, "weight_versions", 1, "version"), "step-4", "not an integer"),
        (("usage",), None, "usage is not"),
        (("usage", "prompt_tokens"), 4, "prompt_tokens is 4, but should be 3"),
        (CACHED, None, "cached_tokens is None"),
        ((*CACHED, "cached_tokens"), 4, "cached_tokens is 4"),
    ],
)
def test_an_answer_with_a_flaw_is_refused_by_name(path, value, message):
    with pytest.raises(BackendProtocolError, match=message) as caught:
        parse(with_value(good_answer(), path, value))
    assert caught.value.backend_id == "b"


@pytest.mark.parametrize("answer", [None, [], "text", 3, {}, {"choices": [3]}])
def test_an_invalid_answer_is_refused(answer):
    with pytest.raises(BackendProtocolError) as caught:
        parse(answer)
    assert caught.value.hint == "Check that this is the address of a vLLM server."
    assert caught.value.backend_id == "b"


def test_nothing_that_shapes_the_distribution_is_left_to_the_server():
    parameters = generate_body(REQUEST)["sampling_params"]
    named = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"}
    assert named | {"frequency_penalty", "min_tokens", "max_tokens", "n"} <= parameters.keys()


def probe(first, second):
    return {"top_logprobs": [{"token_id": 1, "logprob": first}, {"token_id": 2, "logprob": second}]}


def test_a_servers_mode_is_read_from_what_top_k_leaves():
    assert mode_of(probe(0.0, -9999.0)) is LogprobsMode.PROCESSED
    assert mode_of(probe(-0.5, -1.5)) is LogprobsMode.RAW
    for first, second in ((12.5, 7.25), (3.0, -9999.0), (-0.5, 0.25)):
        with pytest.raises(BackendProtocolError, match="not logprobs"):
            mode_of(probe(first, second))
    for entry in (None, {}, {"top_logprobs": [{"logprob": 0.0}]}):
        with pytest.raises(BackendProtocolError):
            mode_of(entry)


@pytest.mark.parametrize(
    ("mode", "sampling", "is_exact"),
    [
        (LogprobsMode.PROCESSED, {"temperature": 0.3}, True),
        (LogprobsMode.PROCESSED, {"temperature": 0.0, "top_p": 0.5}, True),
        (LogprobsMode.PROCESSED, {"temperature": 0.3, "top_k": 1}, True),
        (LogprobsMode.PROCESSED, {"top_p": 0.9}, False),
        (LogprobsMode.PROCESSED, {"top_k": 20}, False),
        (LogprobsMode.PROCESSED, {"min_p": 0.1}, False),
        (LogprobsMode.RAW, {"top_p": 0.9, "top_k": 20, "min_p": 0.1}, True),
        (LogprobsMode.RAW, {"temperature": 0.0}, True),
        (LogprobsMode.RAW, {"temperature": 0.3}, False),
    ],
)
def test_a_sampling_whose_logprobs_the_server_does_not_have_is_refused(mode, sampling, is_exact):
    if is_exact:
        refuse_other_distribution(SamplingOptions(**sampling), mode, "b")
        return
    with pytest.raises(BackendRejected, match="computes logprobs") as caught:
        refuse_other_distribution(SamplingOptions(**sampling), mode, "b")
    assert "--logprobs-mode" in caught.value.hint


METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",num_gpu_blocks="100",engine="0"} 1.0
vllm:cache_config_info{block_size="32",kv_cache_size_tokens="4800",engine="1"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 9.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 7.0
"""


def test_the_load_is_summed_over_the_engines_behind_one_server():
    load = parse_load(METRICS)
    assert (load.running, load.waiting, load.capacity_tokens) == (5, 4, 8000)
    assert load.used_tokens == 4000
    assert parse_load(METRICS.replace(" 9.0", " 10.0")).signature != load.signature


def test_a_server_without_gauges_is_named():
    with pytest.raises(BackendProtocolError, match="num_requests_running"):
        parse_load("# nothing\n")


@pytest.mark.parametrize("figure", ["NaN", "+Inf", "many", '3.0 4.0 5.0 6.0", {'])
@pytest.mark.parametrize("name", ["num_requests_running", "kv_cache_usage_perc"])
def test_a_gauge_that_is_not_a_number_is_a_protocol_error(name, figure):
    metrics = re.sub(rf"(vllm:{name}{{.*}}) .*", rf"\1 {figure}", METRICS)
    with pytest.raises(BackendProtocolError, match="/metrics"):
        parse_load(metrics)
