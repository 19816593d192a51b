"""Engines keep the KV of different weights apart: requests sent after an update reuse none from before it."""

import pytest

pytestmark = pytest.mark.anyio

PROMPT = [11, 42, 7, 199, 23, 5, 310, 64, 64, 8, 17, 250] * 4
ENGINES = [
    "embedded",
    pytest.param(
        "sglang",
        marks=[
            pytest.mark.extended("rollout_service/engines/"),
            pytest.mark.sglang,
            pytest.mark.xdist_group("sglang"),
            pytest.mark.timeout(480),
        ],
    ),
    pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(480)]),
]


@pytest.mark.parametrize("model_engine", ENGINES, indirect=True)
async def test_kv_of_older_weights_that_was_not_flushed_is_out_of_reach(model_engine):
    assert model_engine.backend.keeps_kv_apart
    before = await model_engine.generate(PROMPT, max_new_tokens=20)
    await model_engine.backend.update_weights(str(model_engine.checkpoints.second), 4, flush_cache=False)
    after = await model_engine.generate(PROMPT, max_new_tokens=20)
    assert after.cached_tokens == 0
    await model_engine.backend.update_weights(str(model_engine.checkpoints.second), 5)
    anew = await model_engine.generate(PROMPT, max_new_tokens=20)
    assert (after.output_ids, anew.cached_tokens) == (anew.output_ids, 0)
    assert after.logprobs == pytest.approx(anew.logprobs, abs=1e-4)
    assert after.output_ids != before.output_ids
