"""Every store of live sessions keeps its contract."""

import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from api_schemas.rollouts.sessions import ClosedBecause, Hint, JudgedBy, MaskReason, TurnKind, Votes
from rollout_service.base.errors import StoreError
from rollout_service.live.contract import DIGEST_BYTES, MAX_DIGESTS, OptOuts
from rollout_service.live.sqlite import part_statements, session_statements
from rollout_service.live.sqlite.schema import LIVE
from rollout_service.live.sqlite.store import SqliteLiveStore
from tests.support.live.store import a_session, a_state, a_turn, explicit, judged


@pytest.fixture(params=["memory", "file"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqliteLiveStore]:
    path = tmp_path / "live.sqlite3" if request.param == "file" else ":memory:"
    async with SqliteLiveStore(path) as store:
        yield store


async def test_a_session_comes_back_as_it_was(store):
    session = a_session(
        key_hash=b"k" * 32,
        continues="earlier",
        group="g",
        metadata={"a": [1, {"b": "é"}]},
        quarantined=True,
        closed_at=9.0,
        closed_because=ClosedBecause.IDLE,
    )
    assert await store.open(session)
    assert await store.session("s") == session
    assert await store.session_of_key(b"k" * 32) == session
    assert not await store.open(a_session(tenant="another"))
    assert await store.session("s") == session


async def test_sessions_without_a_key_have_none(store):
    await store.open(a_session())
    assert await store.session_of_key(b"") is None
    assert await store.session("another") is None


async def test_the_newest_session_of_a_client_is_found(store):
    await store.open(a_session("opened", explicit=True))
    assert await store.latest_of_client("") is None
    for number in range(3):
        await store.open(a_session(f"s{number}", explicit=False, client="c" if number < 2 else "d"))
    latest = await store.latest_of_client("c")
    assert (latest.session_id, latest.client) == ("s1", "c")
    await store.delete(session_id="s1")
    earlier = await store.latest_of_client("c")
    assert earlier.session_id == "s0"


async def test_the_tenants_with_sessions_are_listed(store):
    for number, tenant in enumerate(("b", "a", "b")):
        await store.open(a_session(f"s{number}", tenant=tenant))
    assert await store.tenants() == ["a", "b"]


def digests(*numbers: int) -> frozenset[bytes]:
    return frozenset(number.to_bytes(DIGEST_BYTES) for number in numbers)


async def test_what_was_not_to_be_stored_outlives_its_session(store):
    assert await store.opt_outs("c") == OptOuts()
    await store.open(a_session())
    await store.opt_out("c", OptOuts(digests(1, 2)), 5.0)
    await store.opt_out("c", OptOuts(digests(2, 3)), 6.0)
    await store.opt_out("d", OptOuts(is_complete=False), 7.0)
    await store.delete(user="u")
    assert await store.opt_outs("c") == OptOuts(digests(1, 2, 3))
    assert await store.opt_outs("d") == OptOuts(is_complete=False)
    await store.forget_opt_outs(6.0)
    assert await store.opt_outs("c") == OptOuts(digests(1, 2, 3))
    await store.forget_opt_outs(6.5)
    assert await store.opt_outs("c") == OptOuts()
    assert not (await store.opt_outs("d")).is_complete


async def test_of_too_much_some_is_kept_and_noted(store):
    await store.opt_out("c", OptOuts(digests(*range(MAX_DIGESTS))), 5.0)
    assert (await store.opt_outs("c")).is_complete
    await store.opt_out("c", OptOuts(digests(MAX_DIGESTS)), 5.0)
    found = await store.opt_outs("c")
    assert (len(found.digests), found.is_complete) == (MAX_DIGESTS, False)
    await store.opt_out("c", OptOuts(), 5.0)
    assert not (await store.opt_outs("c")).is_complete


async def test_sessions_come_newest_first_and_in_pages(store):
    for number in range(5):
        await store.open(a_session(f"s{number}", opened_at=float(number // 2)))
    await store.close_session("s4", ClosedBecause.EXPLICIT, 10.0)
    first = await store.sessions(limit=2)
    assert [one.session_id for one in first] == ["s4", "s3"]
    rest = await store.sessions(before=(first[-1].opened_at, first[-1].session_id))
    assert [one.session_id for one in rest] == ["s2", "s1", "s0"]
    assert [one.session_id for one in await store.sessions(is_open=False)] == ["s4"]
    assert len(await store.sessions(is_open=True)) == 4


async def test_sessions_can_be_asked_for_by_their_user(store):
    for number, user in enumerate(("alice", "bob", "alice")):
        await store.open(a_session(f"s{number}", user=user, opened_at=float(number)))
    await store.close_session("s0", ClosedBecause.EXPLICIT, 10.0)
    assert [one.session_id for one in await store.sessions(user="alice")] == ["s2", "s0"]
    assert [one.session_id for one in await store.sessions(user="alice", is_open=True)] == ["s2"]
    assert not await store.sessions(user="")


async def test_a_session_closes_once(store):
    await store.open(a_session())
    assert await store.close_session("s", ClosedBecause.EXPLICIT, 5.0)
    assert not await store.close_session("s", ClosedBecause.IDLE, 6.0)
    found = await store.session("s")
    assert (found.closed_at, found.closed_because) == (5.0, ClosedBecause.EXPLICIT)


async def test_sessions_expire_when_they_are_idle_or_old(store):
    await store.open(a_session("idle", opened_at=50.0, used_at=60.0))
    await store.open(a_session("old", opened_at=0.0, used_at=99.0))
    await store.open(a_session("fresh", opened_at=50.0, used_at=60.0))
    await store.served("fresh", 95.0, opted_out=False)
    expired = dict(await store.expired(100.0, idle=30.0, age=90.0))
    assert expired == {"idle": ClosedBecause.IDLE, "old": ClosedBecause.MAX_AGE}


async def test_a_turn_comes_back_as_it_was(store):
    await store.open(a_session())
    hint = Hint(text="use =", prompt_ids=[1, 2], candidates=3, selected_by="longest")
    judge = JudgedBy(pool="judge", model="m@1", prompt_hash="abc")
    turn = a_turn(
        calls=('{"name":"f"}',),
        malformed=2,
        truncated=True,
        answer="é" * 5_000,
        body=bytes(range(256)) * 40,
        next_state=a_state("x" * 9_000),
        mark=judged(votes=Votes(plus=3), judge=judge, hint=hint),
    )
    await store.record(turn)
    assert await store.turn("s", 0) == turn
    assert await store.turns("s") == [turn]
    assert await store.turns("s", 1) == []


async def test_recording_a_turn_again_changes_nothing(store):
    await store.open(a_session())
    await store.record(a_turn())
    await store.record(a_turn(answer="another"))
    assert await store.turns("s") == [a_turn()]
    assert (await store.counts("s"))["served"] == 1


async def test_the_first_mask_stays(store):
    await store.open(a_session())
    await store.record(a_turn())
    await store.mask("s", 0, MaskReason.SUPERSEDED)
    await store.mask("s", 0, MaskReason.REDACTED)
    turn = await store.turn("s", 0)
    assert turn.mask is MaskReason.SUPERSEDED


async def test_only_turns_that_may_be_judged_come_to_the_judge(store):
    await store.open(a_session())
    for turn in range(6):
        await store.record(a_turn(turn, kind=TurnKind.SIDE if turn == 1 else TurnKind.MAIN))
        if turn != 2:
            await store.deliver("s", turn)
        if turn != 3:
            assert await store.follow("s", turn, a_state(at=10.0 - turn))
    await store.mask("s", 4, MaskReason.REDACTED)
    assert [turn.turn for turn in await store.to_judge(10)] == [5, 0]
    assert [turn.turn for turn in await store.to_judge(1)] == [5]
    await store.mark("s", 5, judged())
    await store.take_part("s", None, [], {0: MaskReason.NO_RUN}, 20.0)
    assert await store.to_judge(10) == []


async def test_the_first_next_state_stays(store):
    await store.open(a_session())
    await store.record(a_turn())
    assert await store.follow("s", 0, a_state("first"))
    assert not await store.follow("s", 0, a_state("second"))
    assert not await store.follow("s", 7, a_state())
    turn = await store.turn("s", 0)
    assert turn.next_state == a_state("first")


async def test_explicit_feedback_wins_whenever_it_comes(store):
    await store.open(a_session())
    hint = Hint(text="use =", prompt_ids=[1], candidates=1, selected_by="longest")
    for turn in range(2):
        await store.record(a_turn(turn))
    assert await store.mark("s", 0, judged(1.0, hint=hint))
    assert not await store.mark("s", 0, judged(0.0))
    assert await store.mark("s", 0, explicit(-1.0))
    assert await store.mark("s", 1, explicit(0.5))
    assert not await store.mark("s", 1, judged(1.0))
    assert not await store.mark("s", 9, judged(1.0))
    first, second = await store.turns("s")
    assert first.mark == replace(explicit(-1.0), hint=hint)  # the hint is still true
    assert second.mark == explicit(0.5)
    assert (await store.counts("s"))["judged"] == 2


async def test_a_turn_that_a_part_has_keeps_its_value(store):
    await store.open(a_session())
    await store.record(a_turn())
    await store.mark("s", 0, judged(1.0))
    await store.take_part("s", "run", [0], {}, 5.0)
    assert not await store.mark("s", 0, explicit(-1.0))
    turn = await store.turn("s", 0)
    assert turn.mark == judged(1.0)
    await store.mark("s", 0, explicit(0.5))
    assert await store.give_back_part("s", 0)
    turn = await store.turn("s", 0)
    assert (turn.mark, turn.part) == (explicit(0.5), None)


async def test_each_turn_is_in_one_part_at_most(store):
    await store.open(a_session())
    for turn in range(4):
        await store.record(a_turn(turn))
    first = await store.take_part("s", "run", [0, 2], {1: MaskReason.ZERO}, 5.0)
    assert (first.part, first.run_id, first.usable, first.offset) == (0, "run", (0, 2), None)
    assert await store.take_part("s", "run", [2, 3], {}, 6.0) is None
    second = await store.take_part("s", "run", [3], {}, 7.0)
    assert second.part == 1
    assert [turn.part for turn in await store.turns("s")] == [0, 0, 0, 1]
    assert [turn.dropped for turn in await store.turns("s")] == [None, MaskReason.ZERO, None, None]
    assert await store.parts("run") == [first, second]
    assert await store.parts("another") == []
    assert await store.parts(session_id="s", unclaimed=True) == [first, second]
    await store.claim([("s", 0)], "rollout")
    assert [part.part for part in await store.parts(unclaimed=True)] == [1]
    with pytest.raises(ValueError, match="needs a run"):
        await store.take_part("s", None, [1], {}, 5.0)


async def test_turns_can_be_decided_without_a_part(store):
    await store.open(a_session())
    await store.record(a_turn())
    assert await store.take_part("s", "run", [], {0: MaskReason.NO_NEXT_STATE}, 5.0) is None
    assert await store.parts() == []
    turn = await store.turn("s", 0)
    assert (turn.part, turn.dropped) == (None, MaskReason.NO_NEXT_STATE)
    assert await store.undecided(10) == []


async def test_a_part_is_claimed_by_one_rollout(store):
    await store.open(a_session())
    for turn in range(2):
        await store.record(a_turn(turn))
        await store.take_part("s", "run", [turn], {}, 5.0)
    both = [("s", 0), ("s", 1)]
    claims = [await store.claim(both, name) for name in ("a", "b", "b", "a")]
    assert [claim and claim.part for claim in claims] == [0, 1, 1, 0]
    assert await store.claim(both, "c") is None
    assert await store.claim([("unknown", 0)], "c") is None


async def test_sessions_with_undecided_turns_come_in_turn(store):
    for name in ("a", "b", "c", "empty"):
        await store.open(a_session(name))
        if name != "empty":
            await store.record(a_turn(session_id=name))
    seen = [[one.session_id for one in await store.undecided(2)] for _ in range(3)]
    assert seen == [["a", "b"], ["a", "c"], ["a", "b"]]


async def test_counts_stay_when_sessions_go(store):
    await store.open(a_session())
    for turn in range(5):
        await store.record(a_turn(turn))
    await store.served("s", 9.0, opted_out=True)
    await store.mark("s", 0, judged())
    await store.take_part("s", "run", [0], {1: MaskReason.ZERO}, 5.0)
    await store.claim([("s", 0)], "rollout")
    await store.take_part("s", "run", [2], {}, 5.0)
    before = await store.counts()
    assert before == await store.counts("s")
    assert before == {
        "served": 6,
        "recorded": 5,
        "judged": 1,
        "delivered": 2,
        "waiting": 2,
        "dropped:zero": 1,
        "dropped:opted_out": 1,
    }
    deleted = await store.delete(session_id="s")
    assert (deleted.sessions, deleted.turns) == (("s",), 5)
    assert [(part.part, part.rollout_id) for part in deleted.parts] == [(0, "rollout"), (1, None)]
    assert await store.session("s") is None
    assert await store.turns("s") == []
    assert await store.parts() == []
    assert await store.counts() == {
        "served": 6,
        "recorded": 5,
        "judged": 1,
        "delivered": 1,  # the rollout has it; no other can be claimed any more
        "waiting": 0,
        "dropped:zero": 1,
        "dropped:opted_out": 4,
    }


async def test_a_user_is_deleted_with_all_sessions(store):
    for name, user in (("a", "u"), ("b", "u"), ("c", "v")):
        await store.open(a_session(name, user=user))
    assert await store.sessions_of("u") == 2
    assert (await store.delete(user="u")).sessions == ("a", "b")
    assert await store.sessions_of("u") == 0
    assert await store.session("c") is not None
    with pytest.raises(ValueError, match="name a session or a user"):
        await store.delete()


async def test_pruning_removes_what_is_decided_and_what_is_too_old(store):
    for name in ("open", "decided", "waiting", "delivered"):
        await store.open(a_session(name, retention_seconds=10_000.0))
        await store.record(a_turn(session_id=name))
        if name != "open":
            await store.close_session(name, ClosedBecause.EXPLICIT, 0.0)
    await store.take_part("decided", None, [], {0: MaskReason.NO_NEXT_STATE}, 1.0)
    await store.take_part("delivered", "run", [0], {}, 1.0)
    assert await store.prune(3_599.0, None) == 0
    assert await store.prune(3_600.0, None) == 1
    assert await store.session("decided") is None
    assert await store.prune(10_000.0, None) == 2
    assert [one.session_id for one in await store.sessions()] == ["open"]
    counts = await store.counts()
    assert counts["served"] == 4
    assert counts["waiting"] == 1
    assert counts["dropped:no_run"] == 2
    assert await store.sessions_of("u") == 4  # so that a user is new only once


async def test_pruning_keeps_the_newest_bytes_of_each_user(store):
    for number, name in enumerate(("first", "second", "third")):
        await store.open(a_session(name, opened_at=float(number)))
        await store.record(a_turn(session_id=name, body=b"x" * 1_000))
        await store.close_session(name, ClosedBecause.EXPLICIT, 10.0)
    await store.open(a_session("theirs", user="v"))
    await store.record(a_turn(session_id="theirs", body=b"x" * 2_000))
    assert await store.prune(20.0, 5_000) == 0
    assert await store.prune(20.0, 2_500) == 1
    assert {one.session_id for one in await store.sessions()} == {"second", "third", "theirs"}
    assert await store.prune(20.0, 100) == 2
    assert [one.session_id for one in await store.sessions()] == ["theirs"]  # it is open


async def test_hints_count_as_bytes_and_those_that_were_replaced_do_not(store):
    for name in ("first", "second"):
        await store.open(a_session(name))
        await store.record(a_turn(session_id=name))
        for size in (5_000, 1_000, 1_000):
            hint = Hint(text="x" * size, prompt_ids=[], candidates=1, selected_by="longest")
            await store.mark(name, 0, replace(explicit(1.0), hint=hint))
        await store.close_session(name, ClosedBecause.EXPLICIT, 10.0)
    assert await store.prune(20.0, 4_000) == 0
    assert await store.prune(20.0, 2_000) == 1


async def test_no_statement_reads_all_sessions_or_parts():
    """Those that ask for few, since most sessions and parts have all of their turns decided."""
    db, seen = sqlite3.connect(":memory:"), []
    db.row_factory = sqlite3.Row
    db.executescript(LIVE.tables)
    db.set_trace_callback(seen.append)
    session_statements.undecided(db, 100)
    for which in ({"session_id": "s"}, {"run_id": "run"}):
        part_statements.parts(db, **which)
    db.set_trace_callback(None)
    plans = [row["detail"] for sql in seen if sql[:5] != "BEGIN" for row in db.execute(f"EXPLAIN QUERY PLAN {sql}")]
    assert "SEARCH parts USING INDEX parts_by_run (run_id=?)" in plans
    assert [plan for plan in plans if plan in ("SCAN sessions", "SCAN parts")] == []


@pytest.mark.slow
async def test_what_was_deleted_while_another_program_read_the_file_leaves_it_later(tmp_path):
    async with SqliteLiveStore(tmp_path / "live.sqlite3") as store:
        await store.open(a_session())
        await store.record(a_turn(body=b"a secret"))
        with closing(sqlite3.connect(tmp_path / "live.sqlite3", isolation_level=None)) as other:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM turns").fetchone()
            with pytest.raises(StoreError, match="another program"):
                await store.delete(session_id="s")
        assert await store.prune(0.0, None) == 0
        assert not any(b"a secret" in file.read_bytes() for file in tmp_path.iterdir())


def modes(folder: Path) -> set[int]:
    return {file.stat().st_mode & 0o077 for file in folder.iterdir()}


async def test_a_file_belongs_to_one_store_and_keeps_what_it_has(tmp_path):
    path = tmp_path / "live.sqlite3"
    async with SqliteLiveStore(path) as store:
        await store.open(a_session())
        await store.record(a_turn())
        with pytest.raises(StoreError, match="in use"):
            async with SqliteLiveStore(path):
                pass
        assert modes(tmp_path) == {0}
    async with SqliteLiveStore(path) as store:
        assert await store.turns("s") == [a_turn()]
