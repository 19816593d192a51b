"""A trainer for the ProRL Agent server gets the tokens of rollouts with a reward, and of no others."""

from __future__ import annotations

import pytest

from api_schemas.trajectories import FinishReason, Message
from rollout_service.server.api.routes.prorl import _result
from tests.support.adapters.rollouts import rollout, segment


@pytest.mark.parametrize(("reward", "has_tokens"), [(1.0, True), (0.0, True), (None, False)])
def test_a_rollout_without_a_reward_has_no_tokens_to_train_on(reward, has_tokens):
    one = rollout(segment([1, 2, 3], [0, 1, 1]), reward=reward)
    said = {"messages": [Message(role="assistant", content="4")], "finish_reasons": [FinishReason.STOP]}
    one = one.model_copy(update={"trajectory": one.trajectory.model_copy(update=said)})
    answer = _result(one)
    (message,) = answer["messages"]
    assert (answer["reward"], answer["resolved"]) == (reward, reward == 1.0)
    assert ("output_ids" in message, "logprobs" in message) == (has_tokens, has_tokens)
    assert message["content"] == "4"
