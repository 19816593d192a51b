"""Random histories of live sessions on two nodes: what may not be there is searched for in all that is kept.

Users talk, withdraw their consent for single turns, edit their histories and come back after their sessions have
expired; nodes restart; users of one name in two tenants are deleted one by one, while runs train on what is left.
"""

from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio.from_thread
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from pydantic import SecretStr

from api_schemas.runs import Batch
from api_schemas.sessions import SessionFeedback, SessionRequest
from rollout_service.base.errors import ConflictError, NotFoundError
from rollout_service.cluster.identity import is_gone
from rollout_service.gateway.contract import ClientMessage
from rollout_service.settings.live import LiveKey, LiveSettings
from rollout_service.store import Store
from rollout_service.store.redis import RedisStore
from rollout_service.store.sqlite import SqliteStore
from tests.support.live.node import LiveNode, live_node
from tests.support.redis_server import RedisServer
from tests.support.searching import redis_values, sqlite_values, traces, unpacked
from tests.unit.live.test_replay import RENDERER

pytestmark = pytest.mark.slow(seconds=60)
LONG = pytest.mark.extended("rollout_service/live/", "rollout_service/store/redis/")

USER, TENANTS = "alice", ("a", "b")
KEYS = {
    name: LiveKey(name=name, key=SecretStr(f"the-key-of-{name}"), tenant=tenant, user=user, train=train)
    for name, tenant, user, train in (
        ("chat", "a", USER, True),
        ("chat:vip", "b", USER, True),
        ("office", "a", "bob", True),
        ("guest", "b", None, False),
    )
}
SETTINGS = LiveSettings(keys=list(KEYS.values()), idle_seconds=100.0, max_age_seconds=400.0, retention_seconds=500.0)
CLIENTS = (
    (0, "chat", "x"),
    (0, "chat", "vip:x"),
    (0, "office", "x"),
    (0, "chat:vip", "x"),
    (0, "guest", "x"),
    (1, "office", "x"),
    (1, "chat:vip", "x"),
    (1, "guest", "x"),
)
FORMS = ("goes on", "goes on", "anew", "without answers", "without the last answer", "joined")
TALKS = st.tuples(
    st.integers(0, len(CLIENTS) - 1),
    st.sampled_from(FORMS),
    st.sampled_from((True, True, None, None, False)),
    st.sampled_from((1.0, -1.0, None)),
)
"""Who says something, with which history, whether it may be stored, and how good the answer was."""


@dataclass
class Client:
    """Somebody who talks to a node, and sends a history of its own."""

    node: int
    key: LiveKey
    client_id: str
    history: list[ClientMessage] = field(default_factory=list)
    texts: set[str] = field(default_factory=set)
    """Every message of its conversations."""
    has_refused: bool = False
    """Whether anything of it was not stored."""

    def messages(self, form: str, text: str) -> list[ClientMessage]:
        """Return what it sends with a new text."""
        new = ClientMessage("user", text)
        before = self.history
        match form:
            case "anew":
                return [new]
            case "without answers":
                return [*(one for one in before if one.role == "user"), new]
            case "without the last answer":
                return [*before[:-1], new]
            case "joined" if before:
                return [*before[:-2], ClientMessage("user", f"{before[-2].text}\n\n{text}")]
            case _:
                return [*before, new]


@dataclass
class Cluster:
    """Two nodes with one store of runs, in a folder."""

    folder: Path
    store: Store
    nodes: list[LiveNode]
    store_values: Callable[[], list[bytes]]

    @property
    def files(self) -> list[bytes]:
        """The bytes of all files."""
        return [path.read_bytes() for path in self.folder.rglob("*") if path.is_file()]

    def values(self) -> list[bytes]:
        """Return all that the stores keep."""
        live = [value for node in self.nodes for value in sqlite_values(node.folder / "live.sqlite3")]
        return [*live, *self.store_values()]

    async def spoken(self) -> str:
        """Return the text of all tokens in the store of runs."""
        found, cursor = [], None
        while True:
            page = await self.store.list(cursor=cursor)
            for rollout in page.rollouts:
                trajectory = await self.store.trajectory(rollout.rollout_id)
                if trajectory is not None:
                    found += [RENDERER.decode(one.token_ids) for one in trajectory.segments]
            if (cursor := page.next_cursor) is None:
                return "\n".join(found)


@asynccontextmanager
async def cluster(folder: Path, redis: RedisServer | None) -> AsyncIterator[Cluster]:
    """Run the nodes, and two runs: one of pairs of sessions, one of all others."""
    async with AsyncExitStack() as stack:
        store: Store
        if redis is None:
            path = folder / "store.sqlite3"
            store = await stack.enter_async_context(await SqliteStore.open(path))
            values = lambda: sqlite_values(path)  # noqa: E731
        else:
            config = redis.config()
            store = await stack.enter_async_context(await RedisStore.open(config, is_gone=is_gone))
            values = lambda: redis_values(redis, config)  # noqa: E731
        nodes = [await stack.enter_async_context(live_node(folder / name, store, SETTINGS)) for name in ("one", "two")]
        shares = {"max_user_share": 0.5, "max_session_share": 0.5, "tenants": TENANTS, "next_state": True}
        await nodes[0].create_run("pairs", group_size=2, filters=[], live=shares | {"max_user_share": 1.0})
        await nodes[0].create_run("ones", batch_size=2, live=shares | {"close_turns": 1})
        yield Cluster(folder, store, nodes, values)


class Histories(RuleBasedStateMachine):
    """Random actions of users, nodes and trainers."""

    def __init__(self, redis: RedisServer | None = None) -> None:
        super().__init__()
        self.stack = ExitStack()
        folder = Path(self.stack.enter_context(TemporaryDirectory()))
        self.portal = self.stack.enter_context(anyio.from_thread.start_blocking_portal())
        made = self.portal.wrap_async_context_manager(cluster(folder, redis))
        self.cluster: Cluster = self.stack.enter_context(made)
        self.clients = [Client(node, KEYS[key], client_id) for node, key, client_id in CLIENTS]
        self.number = 0
        self.tenant_of: dict[str, str] = {}
        self.refused: set[str] = set()
        self.gone: set[str] = set()
        self.has_deleted = False
        self.leased: list[tuple[str, int]] = []

    def teardown(self) -> None:
        try:
            self.look()
        finally:
            self.stack.close()

    def do(self, work: Callable[..., Awaitable[Any]], *args: Any, **named: Any) -> Any:
        async def run() -> Any:
            with anyio.fail_after(60):
                return await work(*args, **named)

        return self.portal.call(run)

    def text(self, what: str, tenant: str) -> str:
        """Return a text that nobody else says."""
        self.number += 1
        text = f"{what} {self.number:04} said in the tenant {tenant}"
        self.tenant_of[text] = tenant
        return text

    # -- users -----------------------------------------------------------------

    @rule(talks=st.lists(TALKS, min_size=1, max_size=6))
    def talk(self, talks: list[tuple[int, str, bool | None, float | None]]) -> None:
        for number, form, train, value in talks:
            self.say(self.clients[number], form, train, value)

    def say(self, client: Client, form: str, train: bool | None, value: float | None) -> None:
        """Send a message, look whether it was stored, and say how good the answer was."""
        text, answer = (self.text(what, client.key.tenant) for what in ("words", "answer"))
        messages = client.messages(form, text)
        is_agreed = client.key.train if train is None else train
        brings_back = any(one in message.text for message in messages for one in self.refused)
        key = client.key.key.get_secret_value()
        node = self.cluster.nodes[client.node]
        is_stored = self.do(node.ask, key, client.client_id, messages, answer, train=train)
        assert not (is_stored and (brings_back or not is_agreed))
        assert is_stored or not is_agreed or client.has_refused, "nothing speaks against it"
        client.history = [*messages, ClientMessage("assistant", answer)]
        client.texts |= {text, answer}
        if not is_stored:
            client.has_refused = True
            self.refused |= {text, answer}
        elif value is not None:
            self.rate(client, value)

    def rate(self, client: Client, value: float) -> None:
        """Say how good the last answer was."""
        node, key = self.cluster.nodes[client.node], client.key
        session = self.do(node.live.latest_of_client, node.users.of_client(key.tenant, key.name, client.client_id))
        if session is not None:
            with suppress(NotFoundError, ConflictError):  # nothing was stored, or it was rated before
                self.do(node.sessions.feedback, session.session_id, SessionFeedback(value=value))

    @rule(node=st.integers(0, 1), tenant=st.sampled_from(TENANTS), count=st.integers(1, 3))
    def work_together(self, node: int, tenant: str, count: int) -> None:
        async def work() -> None:
            served = self.cluster.nodes[node]
            group = f"task-{self.number}"
            for _ in range(count):
                text, answer = (self.text(what, tenant) for what in ("words", "answer"))
                request = SessionRequest(tenant=tenant, user=f"worker-{self.number}", train=True, group=group)
                session, key = await served.sessions.open(request)
                assert await served.ask(str(key), "", [ClientMessage("user", text)], answer)
                await served.sessions.feedback(session.session_id, SessionFeedback(value=1.0))
                await served.sessions.end(session.session_id)

        self.do(work)

    @rule(tenant=st.sampled_from(TENANTS))
    def delete_user(self, tenant: str) -> None:
        theirs = [one for one in self.clients if one.key.user == USER and one.key.tenant == tenant]
        texts = {text for client in theirs for text in client.texts}
        before = self.cluster.values()
        shown = {trace for text in texts for trace in traces(before, text.encode())}
        for node in self.cluster.nodes:
            self.do(node.sessions.delete, user=USER, tenant=tenant)
        self.has_deleted = True
        self.gone |= texts
        for client in theirs:
            client.history, client.texts = [], set()
        self.look()
        kept = self.cluster.values()
        gone = [trace for trace in shown if not any(trace in value for value in kept)]
        assert [trace for trace in gone if any(trace in data for data in self.cluster.files)] == []

    # -- nodes -----------------------------------------------------------------

    @rule(seconds=st.sampled_from((10.0, 150.0, 600.0)))
    def pass_time(self, seconds: float) -> None:
        for node in self.cluster.nodes:
            node.now += seconds
            self.do(node.expire)

    @rule(number=st.integers(0, 1))
    def restart(self, number: int) -> None:
        self.cluster.nodes[number].start()

    @rule(steps=st.integers(1, 9))
    def make_some(self, steps: int) -> None:
        self.make_batches(steps)

    def make_batches(self, steps: int = 1_000) -> None:
        """Let the nodes make batches, up to so many steps."""

        async def work() -> None:
            left = steps
            for node in self.cluster.nodes * 2:
                closer, delivery, manager = node.closer, node.delivery, node.manager
                for step in (closer.step, delivery.step, manager.step, node.work, manager.step):
                    if (left := left - 1) >= 0:
                        await step()

        self.do(work)

    # -- trainers --------------------------------------------------------------

    @rule(fates=st.lists(st.sampled_from(("keep", "give back", "acknowledge")), min_size=2, max_size=2))
    def lease(self, fates: list[str]) -> None:
        runs = self.cluster.store.runs
        for run, fate in zip(("pairs", "ones"), fates, strict=True):
            self.make_batches()
            self.number += 1
            batch = self.do(self.cluster.nodes[0].lease, run, f"key-{self.number}")
            if batch is None:
                continue
            self.check(batch)
            self.leased.append((run, batch.number))
            if fate != "keep":
                run_id, number = self.leased.pop(0)
                self.do(runs.acknowledge if fate == "acknowledge" else runs.give_back, run_id, number)

    def check(self, batch: Batch) -> None:
        """Look for what may not be in a batch."""
        samples = [sample for group in batch.groups for sample in group.samples]
        told = [one.rollout for one in samples if one.rollout.trajectory is not None]
        sessions = [rollout.session for rollout in told if rollout.session is not None]
        assert len({session.tenant for session in sessions}) <= 1
        assert self.has_deleted or all(sample.usable for sample in samples)
        if batch.run_id == "ones":
            users = [session.user for session in sessions]
            assert len(users) == len(set(users)), "each has half of a batch of two at most"
        for rollout in told:
            spoken = "".join(RENDERER.decode(one.token_ids) for one in rollout.trajectory.segments)
            found = {text for text in self.tenant_of if text in spoken}
            assert {self.tenant_of[text] for text in found} == {rollout.session.tenant}
            assert not found & (self.refused | self.gone)

    def look(self) -> None:
        """Look for what may not be kept: as text, as tokens, plain and compressed."""
        values = [inner for value in self.cluster.values() for inner in unpacked(value)]
        kept = b"\0".join([*values, self.do(self.cluster.spoken).encode(), *self.cluster.files])
        for text in self.refused | self.gone:
            tokens = array("i", RENDERER.encode(text)[1:-1]).tobytes()
            assert text.encode() not in kept, text
            assert tokens not in kept, text


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("redis", marks=[pytest.mark.redis, LONG])])
def test_what_may_not_be_kept_is_nowhere(request, kind):
    redis = request.getfixturevalue("shared_redis") if kind == "redis" else None
    run_state_machine_as_test(
        lambda: Histories(redis),
        settings=settings(stateful_step_count=30, max_examples=max(1, settings().max_examples // 6), deadline=None),
    )
