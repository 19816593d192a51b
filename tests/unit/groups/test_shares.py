"""The limits of what may be in one batch."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from api_schemas.runs.live import LiveDelivery
from rollout_service.groups.shares import Owner, left_over, next_batch, next_window


@dataclass(frozen=True)
class OneGroup:
    owners: list[Owner]


def group(session: str, user: str = "u", tenant: str = "default") -> OneGroup:
    return OneGroup([Owner(session, f"{user} of {tenant}", tenant)])


def ids(groups: list[OneGroup] | None) -> list[str] | None:
    return None if groups is None else [owner.session for one in groups for owner in one.owners]


def test_a_batch_waits_until_other_users_fill_it():
    groups = [group(f"a{number}", "a") for number in range(9)]
    assert next_window(groups, [], 4, LiveDelivery()) is None
    groups += [group("b", "b"), group("c", "c"), group("d", "d"), group("e", "e")]
    assert ids(next_window(groups, [], 4, LiveDelivery())) == ["a0", "b", "c", "d"]


def test_one_user_may_fill_a_batch_if_the_run_says_so():
    groups = [group("s") for _ in range(5)]
    order = LiveDelivery(max_user_share=1.0, max_session_share=0.5)
    assert next_window(groups, [], 4, order) is None
    whole = LiveDelivery(max_user_share=1.0, max_session_share=1.0)
    assert ids(next_window(groups, [], 4, whole)) == ["s"] * 4
    assert ids(next_window(groups, [], 1, LiveDelivery())) == ["s"]  # one at least


def test_tenants_are_not_mixed_unless_the_run_says_so():
    groups = [group("a", "a", "x"), group("b", "b", "y"), group("c", "c", "y")]
    assert ids(next_window(groups, [], 2, LiveDelivery())) == ["b", "c"]
    assert ids(next_window(groups, [], 2, LiveDelivery(mix_tenants=True))) == ["a", "b"]


def test_a_batch_that_has_begun_is_filled_within_its_limits():
    waiting = [group("old", "a", "x")]
    groups = [group("a", "a", "x"), group("b", "b", "y"), group("c", "c", "x")]
    assert ids(next_window(groups, waiting, 2, LiveDelivery())) == ["c"]


def test_a_group_that_waits_holds_up_no_other_tenant():
    waiting = [group("old", "a", "x")]
    groups = [group("b", "b", "y"), group("c", "c", "y")]
    assert ids(next_window(groups, waiting, 2, LiveDelivery())) == ["b", "c"]


def test_a_group_whose_neighbor_is_gone_goes_with_others_of_its_tenant():
    ready = [group("a", "a", "x"), group("c", "c", "y"), group("d", "d", "y")]
    assert ids(next_batch(ready, 2, LiveDelivery())) == ["c", "d"]
    assert ids(left_over(ready, 2, LiveDelivery())) == ["a"]
    assert ids(next_batch(ready[:2], 2, LiveDelivery(), is_last=True)) == ["a"]
    assert next_batch(ready[:2], 2, LiveDelivery()) == []


GROUPS = st.lists(
    st.builds(group, st.sampled_from("stuv"), st.sampled_from("abcd"), st.sampled_from("xy")), max_size=14
)


@given(GROUPS, GROUPS, st.integers(1, 5), st.booleans(), st.floats(0.05, 1.0))
def test_the_limits_hold_for_any_batch(groups, waiting, size, mix, share):
    order = LiveDelivery(max_user_share=share, max_session_share=share, mix_tenants=mix)
    limit = max(1, int(share * size + 1e-9))

    def check(batch: list[OneGroup]) -> None:
        owners = [owner for one in batch for owner in one.owners]
        assert 0 < len(batch) <= size
        assert max(Counter(owner.user for owner in owners).values()) <= limit
        assert max(Counter(owner.session for owner in owners).values()) <= limit
        assert mix or len({owner.tenant for owner in owners}) == 1

    def without(batch: list[OneGroup]) -> list[OneGroup]:
        return [one for one in ready if not any(one is other for other in batch)]

    window = next_window(groups, waiting, size, order)
    ready = [*waiting, *(window or [])]
    assert len(left_over(ready, size, order)) % size == len(ready) % size
    assert window is None or next_batch(ready, size, order), "a window completes a batch"
    while batch := next_batch(ready, size, order):
        check(batch)
        ready = without(batch)
    while ready:  # the last ones, once the run is over
        batch = next_batch(ready, size, order, is_last=True)
        check(batch)
        ready = without(batch)
