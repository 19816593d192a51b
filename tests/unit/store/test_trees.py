"""The sub-agents of a rollout come back as they were written, to those who asked, and change nothing for others."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts import Rollout, RolloutRequest, TokenExtras
from api_schemas.rollouts.trees import NodeDetail, RolloutNodes
from rollout_service.base.errors import RecordLostError
from rollout_service.store.codec import groups as group_codec
from rollout_service.store.codec import rollouts as rollout_codec
from rollout_service.store.codec import trajectories as trajectory_codec
from tests.support.store.trees import NOW, WORK, bare, conversation, node, nodes, order, rollout

DETAILS = st.sampled_from(NodeDetail)


def stored(result: Rollout, request: RolloutRequest) -> dict[str, Any]:
    """Return the row that a store keeps of a result."""
    return {
        "rollout_id": result.rollout_id,
        "request": request.model_dump_json(),
        "result": rollout_codec.encode_result(result),
        "trajectory": rollout_codec.encode_tokens(result, request),
        "state": result.state,
        "attempt": 1,
        "retries": "[]",
        "spans": "[]",
        "created_at": NOW.timestamp(),
        "changed_at": NOW.timestamp(),
    }


@given(nodes(), DETAILS)
def test_any_tree_comes_back_as_far_as_it_was_asked_for(made, detail):
    result = rollout(nodes=made, work=WORK)
    row = stored(result, order(detail))
    read = group_codec.decode_whole(row)
    if detail is NodeDetail.NONE:
        assert (read.nodes, read.work) == ([], None)
    else:
        assert read.nodes == (made if detail is NodeDetail.TOKENS else bare(made))
        assert read.work == WORK
    tree = rollout_codec.decode_tree(row)
    assert tree.nodes == (made if detail is NodeDetail.TOKENS else bare(made))
    assert tree.work == WORK
    assert RolloutNodes.model_validate_json(tree.model_dump_json()) == tree


@pytest.mark.slow
@given(nodes(), DETAILS)
def test_the_rollouts_own_bytes_do_not_depend_on_its_sub_agents(made, detail):
    alone, result = rollout(nodes=[], work=None), rollout(nodes=made)
    own = trajectory_codec.encode(conversation(3, mask=1))
    row = stored(result, order(detail))
    assert rollout_codec.encode_tokens(alone, order()) == own
    assert trajectory_codec.decode(row["trajectory"]) == alone.trajectory
    (columns,) = trajectory_codec.columns_of(row["trajectory"])
    (same,) = trajectory_codec.columns_of(own)
    assert columns.array("logprobs").tobytes() == same.array("logprobs").tobytes()
    told = json.loads(group_codec.decode_whole(row).model_dump_json(exclude={"nodes", "work"}))
    unasked = group_codec.decode_whole(stored(result, order())).model_dump_json()
    assert unasked == group_codec.decode_whole(stored(alone, order())).model_dump_json()
    assert told == json.loads(unasked)


def test_records_of_an_earlier_release_have_no_sub_agents():
    row = stored(rollout(nodes=[], work=None), order(NodeDetail.TOKENS))
    assert not {"nodes", "work"} & set(json.loads(row["result"]))
    tree = rollout_codec.decode_tree(row)
    assert (tree.nodes, tree.work) == ([], None)


def test_what_was_pruned_is_left_out_and_the_rest_stays():
    row = stored(rollout(), order(NodeDetail.TOKENS)) | {"trajectory": None}
    read = group_codec.decode_whole(row)
    assert read.trajectory is None
    assert read.nodes == bare(rollout().nodes)


def test_sub_agents_without_a_trajectory_of_the_rollout_lose_theirs():
    row = stored(rollout(trajectory=None), order(NodeDetail.TOKENS))
    assert row["trajectory"] is None
    assert group_codec.decode_whole(row).nodes == bare(rollout().nodes)


@pytest.mark.slow
def test_a_record_that_was_cut_off_anywhere_is_named():
    row = stored(rollout(), order(NodeDetail.TOKENS))
    whole = row["trajectory"]
    for end in range(len(whole)):
        with pytest.raises(RecordLostError, match="r1"):
            group_codec.decode_whole(row | {"trajectory": whole[:end]})


@given(st.integers(1, 9), st.data())
def test_no_token_of_a_frozen_sub_agent_is_stored_as_one_to_train_on(size, data):
    mask = data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    (segment,) = conversation(size, mask=0).segments
    masked = segment.model_copy(update={"loss_mask": mask})
    where = data.draw(st.sampled_from(["segments", "untrained"]))
    trajectory = conversation(size, mask=0).model_copy(update={where: [masked]})
    frozen = rollout(nodes=[node("r1", 1), node("r1", 2, trajectory=trajectory)])
    trained = rollout(nodes=[node("r1", 1, trainable=True, trajectory=trajectory)])
    assert rollout_codec.decode(rollout_codec.encode(trained.nodes)) == bare(trained.nodes)
    rollout_codec.encode_result(trained)
    if any(mask):
        with pytest.raises(rollout_codec.FrozenTokensError, match="r1/2") as caught:
            rollout_codec.encode_result(frozen)
        assert caught.value.hint
    else:
        rollout_codec.encode_result(frozen)


def test_asking_for_sub_agents_is_part_of_a_request_only_if_done():
    assert "nodes" not in order().model_dump_json()
    assert TokenExtras.model_validate({"nodes": "summary"}).model_dump()["nodes"] == "summary"
