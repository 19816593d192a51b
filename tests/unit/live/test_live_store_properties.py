"""What holds of a store of live sessions whatever happens to it."""

from collections import Counter
from pathlib import Path
from random import Random

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts.sessions import ClosedBecause, MarkReason, MaskReason
from rollout_service.live.sqlite.store import SqliteLiveStore
from tests.support.live.store import a_session, a_state, a_turn, explicit, judged

SESSIONS = st.sampled_from(["a", "b", "c"])
TURNS = st.integers(0, 4)
STEPS = st.one_of(
    st.tuples(st.just("open"), SESSIONS),
    st.tuples(st.just("close"), SESSIONS),
    st.tuples(st.just("delete"), SESSIONS),
    st.tuples(st.just("opt out"), SESSIONS),
    st.tuples(st.just("prune"), st.sampled_from([0.0, 5_000.0])),
    st.tuples(st.just("record"), SESSIONS, TURNS),
    st.tuples(st.just("judge"), SESSIONS, TURNS),
    st.tuples(st.just("say"), SESSIONS, TURNS),
    st.tuples(st.just("take"), SESSIONS, st.sets(TURNS), st.sets(TURNS)),
    st.tuples(st.just("claim"), SESSIONS, TURNS),
)


async def apply(store: SqliteLiveStore, step: tuple[object, ...]) -> None:  # noqa: C901 - one case a step
    match step:
        case ("open", str(name)):
            await store.open(a_session(name))
        case ("close", str(name)):
            await store.close_session(name, ClosedBecause.EXPLICIT, 1.0)
        case ("delete", str(name)):
            await store.delete(session_id=name)
        case ("opt out", str(name)):
            await store.served(name, 1.0, opted_out=True)
        case ("prune", float(now)):
            await store.prune(now, None)
        case ("record", str(name), int(turn)):
            await store.record(a_turn(turn, name))
        case ("judge", str(name), int(turn)):
            await store.mark(name, turn, judged(1.0))
        case ("say", str(name), int(turn)):
            await store.mark(name, turn, explicit(-1.0))
        case ("take", str(name), set(usable), set(dropped)):
            reasons = dict.fromkeys(dropped - usable, MaskReason.ZERO)
            await store.take_part(name, "run", sorted(usable), reasons, 2.0)
        case ("claim", str(name), int(part)):
            await store.claim([(name, part)], f"rollout-{name}-{part}")
        case _:
            raise AssertionError(step)


async def check(store: SqliteLiveStore) -> None:
    """Check that the counts add up, and that each turn is in at most one part."""
    found = await store.counts()
    dropped = sum(count for name, count in found.items() if name.startswith("dropped:"))
    assert found["served"] == found["delivered"] + dropped + found["waiting"]
    parts = await store.parts()
    usable = [(part.session_id, turn) for part in parts for turn in part.usable]
    assert len(usable) == len(set(usable))
    claimed = Counter(part.rollout_id for part in parts if part.rollout_id is not None)
    assert not claimed or max(claimed.values()) == 1
    for session in await store.sessions():
        for turn in await store.turns(session.session_id):
            if turn.part is not None and turn.dropped is None:
                assert (session.session_id, turn.turn) in usable


@given(st.lists(STEPS, max_size=30))
def test_counts_add_up_and_parts_are_disjoint_whatever_happens(steps):
    async def run() -> None:
        async with SqliteLiveStore(":memory:") as store:
            before = 0
            for step in [("open", "a"), ("open", "b"), *steps]:
                await apply(store, step)
                await check(store)
                served = (await store.counts())["served"]
                assert served >= before  # nothing that was served is forgotten
                before = served

    anyio.run(run)


@given(st.lists(st.sampled_from(["judge", "say", "take"]), min_size=1, max_size=8))
def test_what_the_user_says_wins_until_the_turn_is_taken(steps):
    async def run() -> None:
        async with SqliteLiveStore(":memory:") as store:
            await store.open(a_session())
            await store.record(a_turn())
            for step in steps:
                await apply(store, (step, "s", {0}, set()) if step == "take" else (step, "s", 0))
            before = steps[: steps.index("take")] if "take" in steps else steps
            turn = await store.turn("s", 0)
            reason = turn.mark and turn.mark.reason
            if "say" in before:
                assert reason is MarkReason.EXPLICIT
            else:
                assert reason is (MarkReason.MAJORITY if "judge" in before else None)

    anyio.run(run)


def all_bytes(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
async def test_deleting_leaves_no_byte_in_the_files(tmp_path, seed):
    """Rows of several sizes, mixed with others, so that SQLite moves them between pages before they are deleted."""
    random = Random(seed)
    names = [f"session-{number}" for number in range(12)]
    async with SqliteLiveStore(tmp_path / "live.sqlite3") as store:
        for name in names:
            await store.open(a_session(name, user=name, metadata={"m": f"meta-secret-{name};"}))
        for turn in range(12):
            for name in random.sample(names, len(names)):
                secret = f"secret-{name};".encode()
                size = random.choice([1, 20, 200, 2_000])
                await store.record(
                    a_turn(turn, name, answer=f"said-{secret!r}" * random.choice([1, 30]), body=secret * size)
                )
                await store.follow(name, turn, a_state(f"state-secret-{name};" * random.choice([1, 60])))
                await store.mark(name, turn, judged(1.0, hint_dropped=f"mark-secret-{name};"))
                await store.mark(name, turn, explicit(-1.0))
            if turn == 6:
                await store.delete(user=names[0])
        for name in names[1:6]:
            await store.delete(session_id=name)
        await store.take_part(names[6], None, [], dict.fromkeys(range(12), MaskReason.ZERO), 1.0)
        await store.close_session(names[6], ClosedBecause.EXPLICIT, 1.0)
        await store.prune(1e9, None)
        left = all_bytes(tmp_path)
        for name in names[1:7]:
            assert f"secret-{name};".encode() not in left
        assert f"secret-{names[7]};".encode() in left
