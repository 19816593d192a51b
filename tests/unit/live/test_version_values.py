"""The figures by version count each turn once, with the value that it has, whatever becomes of its session."""

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.live.sqlite.store import SqliteLiveStore
from tests.support.live.store import a_session, a_turn, explicit, judged

VALUES = st.sampled_from([-1.0, 0.0, 0.25, 1.0])
STEPS = st.one_of(
    st.tuples(st.just("judge"), st.integers(0, 5), st.none() | VALUES),
    st.tuples(st.just("say"), st.integers(0, 5), VALUES),
)


def figures(values: dict[int, float]) -> list[tuple[str, int, int, float, float]]:
    """Return what is expected of these values by turn: odd turns are of the version 1 and of the pool `next`."""
    rows = []
    for pool, version in (("next", 1), ("policy", 0)):
        found = [value for turn, value in values.items() if turn % 2 == version]
        if found:
            satisfied = sum(value > 0 for value in found) / len(found)
            rows.append((pool, version, len(found), sum(found) / len(found), satisfied))
    return rows


@given(st.lists(STEPS, max_size=20), st.booleans())
def test_each_turn_counts_once_with_the_value_that_it_has(steps, is_deleted):
    async def run() -> None:
        values: dict[int, float] = {}
        async with SqliteLiveStore(":memory:") as store:
            for number, pool in enumerate(("policy", "next")):
                await store.open(a_session(pool, pool=pool))
                for turn in range(number, 6, 2):
                    await store.record(a_turn(turn, pool, version=number))
            for what, turn, value in steps:
                mark = explicit(value) if what == "say" else judged(value)
                if await store.mark("next" if turn % 2 else "policy", turn, mark) and value is not None:
                    values[turn] = value
            if is_deleted:
                await store.delete(user="u")
            shown = await store.feedback()
        found = [(one.pool, one.version, one.turns, one.value_mean, one.satisfied) for one in shown]
        assert found == [pytest.approx(row) for row in figures(values)]

    anyio.run(run)


async def test_a_value_that_came_too_late_is_not_counted():
    async with SqliteLiveStore(":memory:") as store:
        await store.open(a_session())
        await store.record(a_turn(mark=judged(1.0)))
        await store.take_part("s", "run", [0], {}, 1.0)
        assert not await store.mark("s", 0, explicit(-1.0))
        (shown,) = await store.feedback()
        assert (shown.turns, shown.value_mean) == (1, 1.0)
        assert await store.prune(1e9, None) == 0
