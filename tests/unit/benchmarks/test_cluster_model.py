"""The model of a cluster agrees with what can be computed: each station alone, and rollouts that wait for none."""

from dataclasses import replace

import pytest

from benchmarks.support.scaling.model import (
    MOST_NODES,
    STATES,
    Cluster,
    Costs,
    demands,
    limits,
    predict,
    window_rates,
)

CLUSTER = Cluster(nodes=4, places=8, turns=5, turn_seconds=2.0, cores=2)
NOTHING = Costs(service=0.0, redis=0.0)
EXACT = 1e-6


def test_rollouts_that_take_only_the_engines_time_end_at_the_full_rate():
    found = predict(CLUSTER, NOTHING)
    assert found.rate == pytest.approx(4 * 8 / 10.0, rel=EXACT)
    assert (found.process, found.cores, found.redis, found.disk) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_one_place_with_a_fixed_time_has_no_queue(nodes):
    cluster = replace(CLUSTER, nodes=nodes, places=1, cores=8)
    found = predict(cluster, replace(NOTHING, service=0.7), rounds=4)
    # One rollout's turns never meet; its neighbor's set-up and evaluation can be in the way of at most one turn each.
    least, most = 10.0 + 5 * 0.1, 10.0 + 7 * 0.1
    assert nodes / most - EXACT <= found.rate <= nodes / least + EXACT


def test_the_thread_of_a_process_is_a_station_of_one_server():
    found = predict(replace(CLUSTER, cores=16), replace(NOTHING, service=5.0), rounds=5)
    assert found.rate == pytest.approx(4 / 5.0, rel=0.05)
    assert found.process == pytest.approx(1.0, rel=0.01)
    assert found.cores == pytest.approx(1 / 16, rel=0.01)


def test_nodes_on_one_host_share_its_cores():
    found = predict(replace(CLUSTER, nodes_on_host=4), replace(NOTHING, service=2.0, sandboxes=3.0), rounds=5)
    assert found.rate == pytest.approx(2 / 5.0, rel=0.05)
    assert found.cores == pytest.approx(1.0, rel=0.01)


def test_the_thread_of_redis_is_shared_by_all_nodes():
    found = predict(CLUSTER, replace(NOTHING, redis=0.5), rounds=5)
    assert found.rate == pytest.approx(1 / 0.5, rel=0.05)
    assert found.redis == pytest.approx(1.0, rel=0.01)


def test_writes_that_wait_share_a_flush():
    flush = 1.0
    found = predict(CLUSTER, replace(NOTHING, flush=flush), rounds=3)
    alone = 1 / (STATES * flush)
    assert found.rate > 2 * alone


def test_what_redis_tells_each_node_costs_it_for_each_node():
    costs = replace(NOTHING, telling=0.5)
    found = predict(CLUSTER, costs, rounds=5)
    assert found.rate == pytest.approx(1 / (CLUSTER.nodes * 0.5), rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "costs",
    [
        Costs(service=0.2, sandboxes=0.3, redis=0.01, idle=0.05, redis_idle=0.01, flush=0.02),
        Costs(service=0.9, listening=0.02, sandboxes=0.5, redis=0.2, telling=0.01),
    ],
)
@pytest.mark.parametrize("nodes", [1, 4, 12])
def test_no_station_gives_more_than_it_has(costs, nodes):
    cluster = replace(CLUSTER, nodes=nodes)
    found = predict(cluster, costs, rounds=5)
    needed = max(demands(cluster, costs, link_bytes=1e9).values())
    assert found.rate <= min(1.0, 1 / needed) * cluster.bound * 1.05


def test_what_is_needed_grows_to_the_limit_and_not_beyond():
    costs = Costs(service=0.1, listening=0.001, redis=0.01, telling=5e-5, redis_bytes=1e4, telling_bytes=1e3)
    found = limits(CLUSTER, costs, link_bytes=1e9)
    assert found["redis_thread"] < min(found["node_process"], found["redis_network"], found["node_cores"])
    for station, nodes in found.items():
        for count, fits in ((nodes, True), (nodes + 1, False)):
            needs = demands(replace(CLUSTER, nodes=count), costs, link_bytes=1e9)
            assert (needs[station] <= 1) is fits
    assert set(limits(CLUSTER, NOTHING, link_bytes=1e9).values()) == {MOST_NODES}


@pytest.mark.parametrize("spread", [0.0, 0.1, 1.0])
def test_the_rate_of_a_window_does_not_depend_on_how_ends_are_spread(spread):
    ends = [10.0 * round_ + spread * place for round_ in range(7) for place in range(8)]
    assert window_rates(ends, 2 * 8) == pytest.approx([0.8, 0.8, 0.8], rel=EXACT)


def test_rollouts_that_never_end_have_no_rate():
    with pytest.raises(ValueError, match="check the costs"):
        predict(replace(CLUSTER, nodes=1), replace(NOTHING, service=1e6))
