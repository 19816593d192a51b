"""Engines give the right token extras for each token, even across an interruption."""

from math import exp

import pytest

from rollout_service.engines.contract import RequestedExtras
from rollout_service.engines.pool.backend_handle import check_backend
from rollout_service.engines.pool.continuation import Continuation
from tests.support.engines.engine_under_test import ON_SGLANG, ON_VLLM

pytestmark = pytest.mark.anyio

PROMPT = [(7 * i + 11) % 256 for i in range(40)]
LONG = 600
real_engines = pytest.mark.parametrize("model_engine", ["embedded", ON_SGLANG, ON_VLLM], indirect=True)


@real_engines
async def test_they_are_found_at_registration(model_engine):
    info = await check_backend(model_engine.backend, seconds=60)
    assert info.extras == {"top_logprobs", "prompt_logprobs"}, "the model is not a mixture of experts"


@real_engines
@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_the_likeliest_tokens_are_of_the_distribution_that_logprobs_are_of(model_engine, temperature):
    extras = RequestedExtras(top_logprobs=5)
    generation = await model_engine.generate(PROMPT, extras, max_new_tokens=30, temperature=temperature)
    rows = generation.extras.top_logprobs
    assert [len(row) for row in rows] == [5] * len(generation.output_ids)
    for token, logprob, row in zip(generation.output_ids, generation.logprobs, rows, strict=True):
        values = dict(row)
        assert sum(map(exp, values.values())) < 1 + 1e-5
        if token in values:
            assert values[token] == pytest.approx(logprob, abs=1e-4)
        else:
            assert logprob <= min(values.values()) + 1e-4
        if not temperature:
            assert row[0].token_id == token


@real_engines
async def test_a_prompts_logprobs_are_those_that_its_tokens_were_sampled_with(model_engine):
    turn = await model_engine.generate(PROMPT, max_new_tokens=30)
    again = [*PROMPT, *turn.output_ids]
    for first in (0, 1, len(PROMPT), len(again)):
        extras = RequestedExtras(prompt_logprobs_from=first)
        values = (await model_engine.generate(again, extras, max_new_tokens=1)).extras.prompt_logprobs
        assert len(values) == len(again) - first
        assert (None in values) == (first == 0)
        sampled = values[len(PROMPT) - first :] if first <= len(PROMPT) else values
        assert sampled == pytest.approx(turn.logprobs[len(turn.logprobs) - len(sampled) :], abs=1e-3)


@real_engines
async def test_an_interruption_changes_nothing_of_it(model_engine):
    extras = RequestedExtras(top_logprobs=3, prompt_logprobs_from=0)
    whole = await model_engine.generate(PROMPT, extras, max_new_tokens=LONG)
    continuations = []

    def begin():
        continuations.append(Continuation(model_engine.request(PROMPT, extras, max_new_tokens=LONG)))
        return continuations[-1].next_request()

    partial = await model_engine.interrupt(begin)
    continuation = continuations[-1]
    assert continuation.add(partial) is None
    second = continuation.next_request()
    assert second.extras.prompt_logprobs_from == (None if partial.output_ids else 0)
    resumed = continuation.add(await model_engine.backend.generate(second))
    assert resumed.output_ids == whole.output_ids
    assert resumed.extras.prompt_logprobs[1:] == pytest.approx(whole.extras.prompt_logprobs[1:], abs=1e-3)
    for row, expected in zip(resumed.extras.top_logprobs, whole.extras.top_logprobs, strict=True):
        assert [value for _, value in row] == pytest.approx([value for _, value in expected], abs=1e-3)
