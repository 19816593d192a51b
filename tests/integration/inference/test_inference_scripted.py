"""The scripted engine follows its script, fails as told, and runs as a process."""

import sys
from pathlib import Path

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import GenerateRequest, SamplingOptions, new_request_id
from rollout_service.engines.errors import BackendUnreachable
from rollout_service.engines.kinds.sglang.backend import SGLangBackend
from rollout_service.testing import (
    Counting,
    Fault,
    Replies,
    Reply,
    ScriptedEngine,
    write_random_checkpoint,
)
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


def request(prompt, budget=100):
    return GenerateRequest(new_request_id(), prompt, SamplingOptions(max_new_tokens=budget))


@given(
    turns=st.lists(st.lists(st.integers(10, 15), min_size=1, max_size=4), min_size=1, max_size=4),
    observations=st.lists(st.lists(st.integers(0, 9), max_size=5), min_size=4, max_size=4),
)
def test_a_conversation_gets_its_turns_in_order_and_then_repeats_the_last(turns, observations):
    script, prompt = Replies(turns), [0, 1]
    for turn, observation in zip([*turns, turns[-1]], [*observations, []], strict=False):
        assert script.reply(prompt, 99).ids == turn
        prompt += [*turn, 9, *observation]


def test_ids_are_matched_as_ids():
    script = Replies([[1], [2]])
    assert script.reply([256, 65536], 9).ids == [1]
    assert script.reply([256, 1, 65536], 9).ids == [2]


@pytest.mark.parametrize("turns", [[], [[]], [[1], []]])
def test_a_script_needs_turns_with_tokens(turns):
    with pytest.raises(ValueError, match="at least one"):
        Replies(turns)


async def test_a_reply_is_cut_at_the_budget_and_resumed_after_an_abort():
    async with ScriptedEngine(Replies([list(range(40))]), latency=0.4) as engine:
        backend = SGLangBackend(engine.url)
        short = await backend.generate(request([50], budget=10))
        assert (short.output_ids, short.finish_reason) == (list(range(10)), FinishReason.LENGTH)
        first = request([50])
        results = []

        async def generate(wanted):
            results.append(await backend.generate(wanted))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(generate, first)
            await until(lambda: engine.in_flight)
            await backend.abort(first.request_id)
        partial = results[0]
        assert partial.finish_reason is FinishReason.ABORT
        rest = GenerateRequest(f"{first.request_id}-0001", [50, *partial.output_ids])
        whole = await backend.generate(rest)
        assert partial.output_ids + whole.output_ids == list(range(40))
        assert (whole.finish_reason, whole.matched) == (FinishReason.STOP, 39)
        await backend.close()


class SlowFirst:
    """A script whose first reply takes ten minutes."""

    def __init__(self):
        self.seconds = 600.0

    def reply(self, input_ids, budget):
        seconds, self.seconds = self.seconds, None
        return Reply(list(range(40)), seconds=seconds)


async def test_a_reply_may_take_its_own_time_until_it_is_aborted():
    async with ScriptedEngine(SlowFirst()) as engine:
        backend = SGLangBackend(engine.url)
        first = request([50])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(backend.generate, first)
            await until(lambda: engine.in_flight)
            await backend.abort(first.request_id)
        with anyio.fail_after(60):
            assert (await backend.generate(request([50]))).output_ids == list(range(40))
        await backend.close()


async def test_faults_come_in_order_and_end():
    faults = [Fault.ERROR, None, Fault.DROP, Fault.DROP]  # one on a connection that has rested is not seen
    async with ScriptedEngine(Counting(), faults=faults) as engine:
        backend = SGLangBackend(engine.url)
        with pytest.raises(BackendUnreachable, match="500"):
            await backend.generate(request([1], budget=2))
        await backend.generate(request([1], budget=2))
        with pytest.raises(BackendUnreachable, match="failed"):
            await backend.generate(request([1], budget=2))
        await backend.generate(request([1], budget=2))
        await backend.close()


async def test_it_runs_as_a_process_and_answers_with_texts(tmp_path):
    model = write_random_checkpoint(tmp_path / "model")
    address = tmp_path / "address"
    command = [sys.executable, "-m", "rollout_service.testing", "--model", str(model)]
    command += ["--address", str(address), "--turn", "one<|im_end|>", "--turn", "two<|im_end|>"]
    async with await anyio.open_process(command, stdout=None, stderr=None) as process:
        try:
            await until(address.exists, 30)
            backend = SGLangBackend(address.read_text())
            first = await backend.generate(request([1, 2]))
            second = await backend.generate(request([1, 2, *first.output_ids, 3]))
            texts = [decode(model, each.output_ids) for each in (first, second)]
            assert texts == ["one<|im_end|>", "two<|im_end|>"]
            assert first.finish_reason is FinishReason.STOP
            await backend.close()
        finally:
            process.terminate()


def decode(model: Path, ids):
    return Tokenizer.from_file(str(model / "tokenizer.json")).decode(ids, skip_special_tokens=False)
