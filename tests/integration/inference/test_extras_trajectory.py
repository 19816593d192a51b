"""Token extras stay with their tokens from request to trajectory, across turns, forks and interruptions."""

import base64
from dataclasses import replace

import anyio
import numpy as np
import pytest

from api_schemas.inference import PauseMode
from api_schemas.rollouts import TokenExtras
from api_schemas.trajectories import ForkReason, Message, Segment
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.pool.registry import PoolOptions
from rollout_service.testing import Counting, ScriptedEngine, ScriptedVllm
from rollout_service.testing.engine_turn import experts, likeliest, prompt_logprob
from rollout_service.tokens import check_invariants
from tests.support.tokens.characters import session
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

ROUTING = (3, 2)
CONFIG = '{"vocab_size": 512, "num_hidden_layers": 3, "num_experts_per_tok": 2}'
ALL = TokenExtras(top_logprobs=3, prompt_logprobs=True, routed_experts=True)
OPTIONS = PoolOptions(slow_start=0.0, probe_interval=0.1)


def check_figures(segment: Segment) -> None:
    count = len(segment.token_ids)
    for position in range(count):
        token, is_sampled = segment.token_ids[position], segment.loss_mask[position] == 1
        row = likeliest(token, 3, 512) if is_sampled else []
        assert segment.top_ids[position] == [id_ for id_, _ in row]
        assert segment.top_logprobs[position] == [value for _, value in row]
        expected = None if is_sampled or position == 0 else prompt_logprob(position)
        assert segment.prompt_logprobs[position] == expected
    routed = segment.routed_experts
    assert (routed.shape, routed.dtype) == ([count - 1, *ROUTING], "uint8")
    values = np.frombuffer(base64.b64decode(routed.data), routed.dtype).reshape(routed.shape)
    assert values.tolist() == list(experts(0, count - 1, ROUTING))


class QuickTrials(Counting):
    """Answers at once to those who only try whether new weights work."""

    def reply(self, input_ids, budget):
        return replace(super().reply(input_ids, budget), seconds=0.0 if budget == 1 else None)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "model.safetensors").touch()
    return tmp_path


@pytest.mark.parametrize("kind", [ScriptedEngine, ScriptedVllm])
@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.IN_PLACE])
async def test_every_figure_is_that_of_its_token(model, kind, mode):
    engine = kind(QuickTrials(512), routing=ROUTING, model_path=model)
    async with engine, Pools(OPTIONS) as pools:
        view = await pools.register(engine.url)
        assert view.exports == ["prompt_logprobs", "routed_experts", "top_logprobs"]
        engine.latency, pool = 0.3, pools["policy"]
        policy = session(pool, stop_token_ids=(), exports=ALL)
        for turn in range(3):

            async def respond(text=f"question {turn}"):
                await policy.respond([Message(role="user", content=text)], max_tokens=40)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(respond)
                for version in (2 * turn + 1, 2 * turn + 2):
                    await until(lambda: engine.in_flight)
                    await anyio.sleep(0.05)
                    await pool.update_weights(str(model), version, mode)
        trajectory = policy.trajectory()
        check_invariants(trajectory)
        (segment,) = trajectory.segments
        assert len(set(segment.versions)) == 8, "three turns with two updates each, and context"
        check_figures(segment)


async def test_a_new_segment_has_figures_of_its_own(model):
    engine = ScriptedEngine(Counting(512), routing=ROUTING, model_path=model)
    async with engine, Pools(OPTIONS) as pools:
        await pools.register(engine.url)
        policy = session(pools["policy"], stop_token_ids=(), exports=ALL)
        await policy.respond([Message(role="user", content="first")], max_tokens=9)
        policy.replace([Message(role="user", content="fist")], ForkReason.HISTORY_EDITED)
        await policy.respond([], max_tokens=7)
        trajectory = policy.trajectory()
        check_invariants(trajectory)
        assert len(trajectory.segments) == 2
        for segment in trajectory.segments:
            check_figures(segment)


async def test_values_that_were_not_requested_are_none(model):
    engine = ScriptedEngine(Counting(512), routing=ROUTING, model_path=model)
    async with engine, Pools(OPTIONS) as pools:
        await pools.register(engine.url)
        policy = session(pools["policy"], stop_token_ids=())
        await policy.respond([Message(role="user", content="first")], max_tokens=9)
        (segment,) = policy.trajectory().segments
        figures = (segment.top_ids, segment.top_logprobs, segment.prompt_logprobs, segment.routed_experts)
        assert figures == (None, None, None, None)
