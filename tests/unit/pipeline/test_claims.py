"""What a node claims: what the cluster lets it, without the environments whose sub-agents nobody serves."""

import anyio
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.pipeline.claims import ClaimRules

NAMES = ["calc", "math", "pointers", "split"]
POOLS = st.sampled_from(["frozen", "frozen-1", "frozen-2"])


@given(
    left=st.dictionaries(st.sampled_from(NAMES), POOLS),
    cluster=st.none() | st.dictionaries(st.sampled_from(NAMES), st.floats(0, 10)),
    changes=st.lists(st.frozensets(POOLS), min_size=1, max_size=4),
)
def test_an_environment_is_claimed_unless_its_sub_agents_are_not_served(left, cluster, changes):
    rules = ClaimRules(NAMES)
    rules.suit(cluster)
    for name, pool in left.items():
        rules.leave(name, pool)
    came_back: set[str] = set()
    for pools in changes:
        came_back |= pools
        waits = rules.waits(pools)
        for name in NAMES:
            is_let = cluster is None or name in cluster
            is_served = name not in left or left[name] in came_back
            is_claimed = waits is None or name in waits
            assert is_claimed is (is_let and is_served)
            if is_claimed and cluster is not None:
                assert waits is not None
                assert waits[name] == cluster[name]


def test_everything_is_claimed_at_once_unless_something_waits_for_its_sub_agents():
    rules = ClaimRules(NAMES)
    assert rules.waits([]) is None, "also rollouts of an environment that is gone, which then fail"
    rules.leave("pointers", "frozen-1")
    assert rules.waits(["policy"]) == {"calc": 0.0, "math": 0.0, "split": 0.0}
    assert rules.waits(["policy", "frozen-1"]) is None


async def test_closed_rules_are_waited_for():
    rules = ClaimRules()
    rules.open(False)
    with anyio.move_on_after(0.05) as scope:
        await rules.until_open()
    assert scope.cancelled_caught
    rules.open(True)
    await rules.until_open()
