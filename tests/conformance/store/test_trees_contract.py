"""Every kind of store keeps the sub-agents of rollouts, and delivers them only where they were asked for."""

import threading

import pytest

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, TokenExtras
from api_schemas.rollouts.trees import NodeDetail
from api_schemas.runs import Group, RunState
from rollout_service.settings import RetentionSettings
from rollout_service.store import Lease, Store
from rollout_service.store.codec import rollouts
from rollout_service.store.codec.groups import MAX_NODES_BYTES, group_json
from rollout_service.store.codec.rollouts import FrozenTokensError
from rollout_service.store.runs_contract import ClosedSample, GroupClosure, NewGroup
from tests.support.runs import TASKS, create_run, leased_batch, without_tokens
from tests.support.store.servers import PLACES
from tests.support.store.trees import NOW, WORK, bare, conversation, node, order, rollout

SUMMARY, TOKENS = NodeDetail.SUMMARY, NodeDetail.TOKENS
KINDS = ["sqlite", *PLACES, pytest.param("shards", marks=pytest.mark.redis)]


def ended(lease: Lease, **fields: object) -> Rollout:
    """Return the result of a leased rollout: that of two sub-agents, with these fields changed."""
    return rollout(lease.rollout_id, task=lease.request.task, created_at=lease.created_at, **fields)


async def finish(store: Store, request: RolloutRequest, **fields: object) -> Rollout:
    await store.submit(request)
    (lease,) = await store.claim("w", limit=1, lease_seconds=100)
    result = ended(lease, **fields)
    assert await store.finish(lease, "w", result)
    return result


async def close_a_group(store: Store, detail: NodeDetail, **fields: object) -> Group:
    """Make a group of two rollouts with sub-agents, of which the second is stale, keep and return it."""
    await create_run(store, nodes=detail, batch_size=1)
    exports = TokenExtras(nodes=detail)
    requests = [RolloutRequest(rollout_id=f"a.0.{n}", task=TASKS[0], exports=exports) for n in range(2)]
    assert await store.runs.start_groups("a", [NewGroup(0, 0, requests)]) == 1
    for lease in await store.claim("w", limit=2, lease_seconds=1e6):
        assert await store.finish(lease, "w", ended(lease, **fields))
    samples = [
        ClosedSample(0, "a.0.0", True, None, 1.0, None),
        ClosedSample(1, "a.0.1", False, "stale", None, None),
    ]
    await store.runs.close_group("a", GroupClosure(0, None, samples, 1.0, 0.0, 3, 3))
    return await store.runs.group("a", 0)


@pytest.mark.parametrize("detail", NodeDetail)
async def test_a_rollout_has_what_its_request_asks_for(store, detail):
    result = await finish(store, order(detail))
    for read in (await store.get("r1"), await store.wait_for_result("r1")):
        assert read.nodes == ([] if detail is NodeDetail.NONE else bare(result.nodes))
        assert read.work == (None if detail is NodeDetail.NONE else WORK)
    everything = await store.get("r1", whole_tree=True)
    assert (everything.nodes, everything.work) == (bare(result.nodes), WORK)
    (listed,) = (await store.list()).rollouts
    assert (listed.nodes, listed.work) == ([], None if detail is NodeDetail.NONE else WORK)
    assert await store.trajectory("r1") == result.trajectory
    tree, whole = await store.tree("r1"), await store.tree("r1", trajectories=True)
    assert (tree.nodes, tree.work, whole.work) == (bare(result.nodes), WORK, WORK)
    assert whole.nodes == (result.nodes if detail is TOKENS else bare(result.nodes))


async def test_a_rollout_that_has_not_ended_has_no_tree(store):
    assert await store.tree("r1") is None
    await store.submit(order(SUMMARY))
    assert await store.tree("r1", trajectories=True) is None
    await finish(store, order(SUMMARY), nodes=[], work=None)
    tree = await store.tree("r1")
    assert (tree.nodes, tree.work) == ([], None)


async def test_the_tokens_of_a_large_tree_come_back(store):
    nodes = [node("r1", n, trajectory=conversation(5_000, mask=0)) for n in range(1, 9)]
    result = await finish(store, order(TOKENS), nodes=nodes)
    tree = await store.tree("r1", trajectories=True)
    assert tree.nodes == result.nodes


async def test_the_event_loop_decodes_no_list_and_no_large_tree(store, monkeypatch):
    await finish(store, order(SUMMARY), nodes=[node("r1", n, trajectory=None) for n in range(1, 500)])
    decode, threads = rollouts._decode_rollout, set()
    noted = lambda *given: threads.add(threading.current_thread()) or decode(*given)  # noqa: E731
    monkeypatch.setattr(rollouts, "_decode_rollout", noted)
    assert len((await store.get("r1")).nodes) == 499
    assert len((await store.list()).rollouts) == 1
    assert threads
    assert threading.main_thread() not in threads


async def test_a_sample_with_a_frozen_token_to_train_on_is_refused(store):
    await store.submit(order(TOKENS))
    (lease,) = await store.claim("w", limit=1, lease_seconds=100)
    wrong = ended(lease, nodes=[node("r1", 1, trajectory=conversation(2, mask=1))])
    with pytest.raises(FrozenTokensError):
        await store.finish(lease, "w", wrong)
    assert await store.tree("r1") is None
    assert await store.finish(lease, "w", ended(lease)), "the lease is held, and a right result is taken"


async def test_a_group_has_what_its_run_asks_for(store):
    group = await close_a_group(store, TOKENS)
    kept, stale = group.samples
    assert kept.rollout.nodes == rollout("a.0.0").nodes
    assert stale.rollout.nodes == bare(rollout("a.0.1").nodes)
    assert (kept.rollout.work, kept.nodes_by_reference) == (WORK, False)
    (head,) = await store.runs.group_heads("a", [0])
    assert head.json == without_tokens(group)
    (columns,) = await store.runs.columns("a", 0)
    assert columns.array("token_ids").tolist() == [0, 1, 2], "sub-agents have no columns"


async def test_redelivery_is_byte_identical(store, clock):
    await close_a_group(store, TOKENS)
    seen = set()
    for _ in range(3):
        assert (await leased_batch(store)).groups == [0]
        (head,) = await store.runs.group_heads("a", [0])
        seen.add((group_json(await store.runs.group("a", 0)), head.json))
        await store.runs.give_back("a", 0)
        clock.now += 100
    assert len(seen) == 1


async def test_a_run_that_did_not_ask_is_delivered_as_if_there_were_no_sub_agents(store):
    group = await close_a_group(store, NodeDetail.NONE)
    for sample in group.samples:
        assert (sample.rollout.nodes, sample.rollout.work) == ([], None)
    told = group_json(group)
    assert b'"nodes' not in told
    assert b'"work"' not in told
    (head,) = await store.runs.group_heads("a", [0])
    assert head.json == without_tokens(group)


async def test_a_tree_that_is_too_large_for_a_batch_is_delivered_by_reference(store):
    large = [node("a.0.0", 1), node("a.0.0", 2, result="x" * MAX_NODES_BYTES)]
    group = await close_a_group(store, SUMMARY, nodes=large)
    for sample in group.samples:
        assert (sample.nodes_by_reference, sample.rollout.nodes, sample.rollout.work) == (True, [], WORK)
    (head,) = await store.runs.group_heads("a", [0])
    assert head.json == without_tokens(group)
    tree = await store.tree("a.0.0")
    assert tree.nodes == bare(large), "the reference leads to all of them"
    (exported, _) = await store.runs.exported_samples("a", 0)
    assert exported.sample.rollout.nodes == bare(large)
    assert not exported.sample.nodes_by_reference


async def test_pruning_takes_all_tokens_and_leaves_the_tree(store):
    await close_a_group(store, TOKENS)
    await leased_batch(store)
    await store.runs.acknowledge("a", 0)
    assert await store.runs.prune("a", seconds=None, max_bytes=0) == 1
    assert await store.trajectory("a.0.0") is None
    tree = await store.tree("a.0.0", trajectories=True)
    assert (tree.nodes, tree.work) == (bare(rollout("a.0.0").nodes), WORK)
    sample = (await store.runs.group("a", 0)).samples[0]
    assert sample.rollout.nodes == tree.nodes
    await store.runs.update("a", state=RunState.ENDED)
    while await store.runs.delete_expired(
        RetentionSettings(settled_group_seconds=0.0, ended_run_seconds=0.0, rollout_seconds=0.0)
    ):
        pass
    assert await store.tree("a.0.0") is None


@pytest.mark.parametrize("detail", NodeDetail)
async def test_scoring_again_gets_the_tree_whatever_was_asked_for(store, detail):
    await close_a_group(store, detail)
    recorded, _ = await store.runs.recorded_rollouts(["a.0.0", "a.0.1"])
    assert recorded.rollout.nodes == bare(rollout("a.0.0").nodes)
    assert recorded.rollout.work == WORK
    assert recorded.rollout.state is RolloutState.COMPLETED
    assert recorded.rollout.created_at != NOW
