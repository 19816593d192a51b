"""Events are chosen by kind and subject, read once for all readers, and written without holding anything up."""

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from api_schemas.events import Event, EventKind
from api_schemas.inference import BackendState, BackendView
from rollout_service.base.errors import InvalidFieldError, StoreError
from rollout_service.server.events import PAGE_EVENTS, Announcer, EventSelection, EventTail, StateWatcher
from rollout_service.store.sqlite import SqliteStore
from sandboxes.scheduling.pressure import HoldReason
from tests.support.samples import backend_view


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with await SqliteStore.open(tmp_path / "store.sqlite3") as opened:
        yield opened


@pytest.mark.parametrize(
    ("kinds", "subjects", "kind", "subject", "wanted"),
    [
        ([], [], "rollout.state", "a", True),
        (["rollout.state"], [], "rollout.state", "a", True),
        (["rollout.state"], [], "rollout.resume", "a", False),
        (["rollout."], [], "rollout.resume", "a", True),
        (["run.", "batch.leased"], [], "batch.leased", "a", True),
        (["run.", "batch.leased"], [], "rollout.state", "a", False),
        ([], ["a", "b"], "run.state", "b", True),
        (["run."], ["a"], "run.state", "b", False),
    ],
)
def test_a_reader_gets_the_events_it_wants(kinds, subjects, kind, subject, wanted):
    assert EventSelection.of(kinds, subjects).has(kind, subject) is wanted


@pytest.mark.parametrize("kind", ["rollout.states", "rollout", ".", "", "rollout.*", "roll."])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(InvalidFieldError) as refused:
        EventSelection.of(["run.state", kind], [])
    assert [field.path for field in refused.value.fields] == ["query.kind"]


async def read_all(tail: EventTail, store: SqliteStore, seen: int = 0) -> list[int]:
    ids: list[int] = []
    newest = await store.last_event()
    while seen < newest:
        events = await tail.after(seen, newest)
        assert events
        ids += [event.event_id for event in events]
        seen = events[-1].event_id
    return ids


class CountingStore:
    """Counts how often events are read."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self.reads = 0

    async def events(self, *, after: int, limit: int = 1_000) -> list[Event]:
        self.reads += 1
        return await self._store.events(after=after, limit=limit)


async def test_readers_at_the_end_read_an_event_once(store):
    counting = CountingStore(store)
    tail = EventTail(counting)  # type: ignore[arg-type]
    for number in range(20):
        event = await store.record("run.state", f"run-{number}", {"state": "running"})
        found: list[int] = []

        async def read(seen: int, newest: int, into: list[int]) -> None:
            into += [each.event_id for each in await tail.after(seen, newest)]

        async with anyio.create_task_group() as tasks:
            for _ in range(10):
                tasks.start_soon(read, event.event_id - 1, event.event_id, found)
        assert found == [event.event_id] * 10
    assert counting.reads == 20


@pytest.mark.slow
async def test_a_reader_far_behind_misses_nothing(store):
    tail = EventTail(store)
    count = PAGE_EVENTS * 2 + 500
    for _ in range(count):
        await store.record("run.changed", "run", {})
    assert await read_all(tail, store, count - 10) == list(range(count - 9, count + 1))
    assert await read_all(tail, store) == list(range(1, count + 1))


@pytest.mark.slow
async def test_the_tail_is_bounded(store, monkeypatch):
    monkeypatch.setattr("rollout_service.server.events.TAIL_EVENTS", 64)
    tail = EventTail(store)
    for _ in range(64 + 300):
        event = await store.record("run.changed", "run", {})
        await tail.after(event.event_id - 1, event.event_id)
    assert len(tail._events) == 64
    assert await read_all(tail, store, 100) == list(range(101, 64 + 301))


async def test_a_tail_follows_a_store_that_has_lost_events(store):
    for number in range(10):
        await store.record("run.changed", f"run-{number}", {})
    lost = {7, 8, 9, 10}

    class Losing:
        async def events(self, *, after: int, limit: int = 1_000) -> list[Event]:
            found = await store.events(after=after, limit=limit)
            return [event for event in found if event.event_id not in lost]

    tail = EventTail(store)
    assert len(await tail.after(0, 10)) == 10
    tail._store = Losing()  # type: ignore[assignment]
    tail.rewind(6)
    assert [event.event_id for event in await tail.after(3, 6)] == [4, 5, 6]
    lost.clear()
    assert [event.event_id for event in await tail.after(6, 10)] == [7, 8, 9, 10]


async def test_events_are_written_in_the_order_of_their_announcement(store, monkeypatch):
    monkeypatch.setattr("rollout_service.server.events.CLOSE_SECONDS", 60.0)
    announcer = Announcer(store)
    said: list[tuple[EventKind, str, dict[str, Any]]] = []
    async with announcer.running():
        for number in range(100):
            said += [(EventKind.POOL_PAUSED, "a", {"number": number}), (EventKind.POOL_RESUMED, "b", {})]
            for one in said[-2:]:
                announcer.announce(*one)
            if number % 10 == 0:
                await anyio.sleep(0.001)
    assert [(event.kind, event.subject, event.data) for event in await store.events(after=0)] == said


async def test_no_more_events_wait_than_are_kept(store, monkeypatch):
    monkeypatch.setattr("rollout_service.server.events.CLOSE_SECONDS", 60.0)
    monkeypatch.setattr("rollout_service.server.events.MAX_WAITING", 32)
    announcer = Announcer(store)
    for number in range(32 + 5):
        announcer.announce(EventKind.BACKEND_STATE, "policy@a", {"number": number})
    async with announcer.running():
        pass
    assert announcer.dropped == 5
    written = await store.events(after=0)
    assert [event.data["number"] for event in written] == list(range(32))


async def test_a_store_that_hangs_does_not_hold_up_the_end(monkeypatch):
    class Hanging:
        async def record(self, kind: str, subject: str, data: dict[str, Any]) -> Event:
            await anyio.sleep_forever()
            raise AssertionError("nothing wakes it")

    monkeypatch.setattr("rollout_service.server.events.CLOSE_SECONDS", 0.05)
    announcer = Announcer(Hanging())  # type: ignore[arg-type]
    with anyio.fail_after(5):
        async with announcer.running():
            announcer.announce(EventKind.POOL_PAUSED, "policy", {})
    announcer.announce(EventKind.POOL_RESUMED, "policy", {})
    assert announcer.dropped == 1


async def test_a_store_that_fails_is_nobodys_problem(store):
    class Failing:
        async def record(self, kind: str, subject: str, data: dict[str, Any]) -> Event:
            raise StoreError("the disk is full")

    announcer = Announcer(Failing())  # type: ignore[arg-type]
    async with announcer.running():
        announcer.announce(EventKind.POOL_PAUSED, "policy", {})
        with anyio.fail_after(5):
            while not announcer.dropped:
                await anyio.lowlevel.checkpoint()
    assert announcer.dropped == 1


@dataclass
class Admission:
    """As much of an admission controller as the watcher looks at."""

    waiting: int = 0
    hold_reasons: tuple[HoldReason, ...] = ()


@dataclass
class Watched:
    """What a watcher looks at, and what it told."""

    told: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    backends: list[BackendView] = field(default_factory=list)
    claims: bool = True
    admission: Admission = field(default_factory=Admission)

    def watcher(self) -> StateWatcher:
        node = SimpleNamespace(name="here", admission=self.admission)
        return StateWatcher(
            lambda kind, subject, data: self.told.append((str(kind), subject, data)),
            node,  # type: ignore[arg-type]
            backends=lambda: self.backends,
            claims=lambda: self.claims,
        )


def backend(state: BackendState, error: str | None = None) -> BackendView:
    return backend_view("policy@a", state=state, last_error=error)


def test_an_engine_is_told_of_when_its_state_changes_and_why():
    watched = Watched()
    watcher = watched.watcher()
    states = [BackendState.READY, BackendState.READY, BackendState.FAILED, BackendState.FAILED]
    for now, state in enumerate(states):
        watched.backends = [backend(state, "refused the connection")]
        watcher.look(now)
    watched.backends = []
    watcher.look(10)
    watcher.look(11)
    data = [data for kind, _, data in watched.told if kind == "backend.state"]
    assert [(each["was"], each["state"]) for each in data] == [
        (None, "ready"),
        ("ready", "failed"),
        ("failed", "removed"),
    ]
    assert data[1]["error"] == "refused the connection"
    assert "error" not in data[0]


def test_a_drained_node_is_told_of_once():
    watched = Watched()
    watcher = watched.watcher()
    for now, claims in enumerate([True, False, False, True, True]):
        watched.claims = claims
        watcher.look(now)
    assert watched.told == [
        ("node.state", "here", {"state": "draining"}),
        ("node.state", "here", {"state": "ready"}),
    ]


def test_a_hold_that_flickers_is_one_hold():
    watched = Watched()
    watcher = watched.watcher()
    reason = HoldReason("memory", "memory: 1 GiB available")
    for now in range(60):
        flickers = now < 30 and now % 2 == 0
        watched.admission.waiting = 3 if flickers else 0
        watched.admission.hold_reasons = (reason,)
        watcher.look(float(now))
    began, ended = [data for _, _, data in watched.told]
    assert began == {"state": "began", "resource": "memory", "reason": reason.text, "waiting": 3}
    assert (ended["state"], ended["resource"], ended["seconds"]) == ("ended", "memory", 28.0)


def test_the_page_on_events_lists_every_kind_and_no_other():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "events.md").read_text()
    kinds = page.partition("## Kinds")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in kinds.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`([a-z_.]+)`", row)]
    assert sorted(listed) == sorted(map(str, EventKind))


def test_no_code_writes_an_event_of_another_kind():
    root = Path(__file__).parents[3] / "rollout_service" / "store"
    written = set()
    for path in [*root.rglob("*.py"), *root.rglob("*.lua")]:
        written |= set(re.findall(r"""['"]((?:rollout|run|group|backend|pool|node)\.[a-z_]+)['"]""", path.read_text()))
    assert written
    assert written - {"rollout.trajectory"} <= set(map(str, EventKind))
