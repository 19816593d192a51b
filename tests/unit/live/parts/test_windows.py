"""The limits of what may be in one batch."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from api_schemas.runs.live import LiveDelivery
from rollout_service.live.contract import PartRecord
from rollout_service.live.parts.windows import PartGroup, next_window
from tests.support.live.store import a_session


def group(session: str, user: str = "u", tenant: str = "default", part: int = 0) -> PartGroup:
    record = PartRecord(session_id=session, part=part, run_id="run", usable=(0,), closed_at=0.0)
    return PartGroup((record,), (a_session(session, user=user, tenant=tenant),))


def ids(window: list[PartGroup] | None) -> list[str] | None:
    return None if window is None else [part.session_id for group in window for part in group.parts]


def test_a_batch_waits_until_other_users_fill_it() -> None:
    groups = [group(f"a{number}", "a") for number in range(9)]
    assert next_window(groups, [], 4, LiveDelivery()) is None
    groups += [group("b", "b"), group("c", "c"), group("d", "d"), group("e", "e")]
    assert ids(next_window(groups, [], 4, LiveDelivery())) == ["a0", "b", "c", "d"]


def test_one_user_may_fill_a_batch_if_the_run_says_so() -> None:
    groups = [group("s", part=number) for number in range(5)]
    order = LiveDelivery(max_user_share=1.0, max_session_share=0.5)
    assert next_window(groups, [], 4, order) is None
    whole = LiveDelivery(max_user_share=1.0, max_session_share=1.0)
    assert ids(next_window(groups, [], 4, whole)) == ["s"] * 4
    assert ids(next_window(groups, [], 1, LiveDelivery())) == ["s"]  # one at least


def test_tenants_are_not_mixed_unless_the_run_says_so() -> None:
    groups = [group("a", "a", "x"), group("b", "b", "y"), group("c", "c", "y")]
    assert ids(next_window(groups, [], 2, LiveDelivery())) == ["b", "c"]
    assert ids(next_window(groups, [], 2, LiveDelivery(mix_tenants=True))) == ["a", "b"]


def test_a_batch_that_has_begun_is_filled_within_its_limits() -> None:
    carried = [group("old", "a", "x")]
    groups = [group("a", "a", "x"), group("b", "b", "y"), group("c", "c", "x")]
    assert ids(next_window(groups, carried, 2, LiveDelivery())) == ["c"]


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xy")), max_size=20),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xy")), max_size=2),
    st.integers(3, 8),
    st.booleans(),
    st.floats(0.05, 1.0),
)
def test_the_limits_hold_for_any_batch(
    waiting: list[tuple[str, str]], begun: list[tuple[str, str]], size: int, mix: bool, share: float
) -> None:
    groups = [group(f"{user}{tenant}", user, tenant) for user, tenant in waiting]
    carried = [group(f"{user}{tenant}", user, tenant) for user, tenant in begun]
    order = LiveDelivery(max_user_share=share, max_session_share=share, mix_tenants=mix)
    window = next_window(groups, carried, size, order)
    if window is None:
        return
    assert len(window) + len(carried) == size
    limit = max(1, int(share * size + 1e-9))
    before = Counter(user for one in carried for user in one.users)
    users = Counter(user for one in [*window, *carried] for user in one.users)
    assert all(count <= max(limit, before[user]) for user, count in users.items())
    if not mix:
        assert len({tenant for one in window for tenant in one.tenants}) <= 1
