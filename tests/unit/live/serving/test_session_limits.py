"""Sessions are bounded, and wait for a pool that is paused or without engines."""

import stat
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from api_schemas.sessions import SessionFeedback, SessionRequest
from rollout_service.base.errors import ConfigurationError, ConflictError, InvalidFieldError, StoreError
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.contract import GenerateRequest, Generation, TokenChunk, new_request_id
from rollout_service.engines.errors import BackendRejected, NoBackendError
from rollout_service.live.detectors import Detectors
from rollout_service.live.metrics import LiveMetrics
from rollout_service.live.recorder import RecordingParts
from rollout_service.live.register import PoolHeldError, RateLimitedError, UserHashes
from rollout_service.live.serving.app import TurnOptions, read_turn_options, split_session_path
from rollout_service.live.serving.engines import HeldPool
from rollout_service.live.serving.resolver import RequestRate
from rollout_service.live.serving.views import decode_cursor, encode_cursor
from rollout_service.live.sessions import LiveSessions
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.settings.live import LiveSettings
from tests.support.clocks import ManualClock
from tests.support.gateway.manual_pool import ManualPool
from tests.support.live.store import a_session, a_turn


def taken(rate: RequestRate, user: str) -> bool:
    try:
        rate.take(user)
    except RateLimitedError:
        return False
    return True


@given(steps=st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 30)), max_size=60), most=st.integers(1, 6))
def test_no_user_sends_more_than_twice_its_limit_in_a_minute(steps, most):
    clock = ManualClock(0.0)
    rate = RequestRate(most, clock)
    served: dict[str, list[float]] = {"a": [], "b": []}
    for user, pause in steps:
        clock.now += pause
        if taken(rate, user):
            served[user].append(clock.now)
    for times in served.values():
        for begin in times:
            # What was left at the beginning, and what a minute gives back.
            assert len([at for at in times if begin <= at < begin + 60]) <= 2 * most


def test_a_refused_user_is_served_after_the_time_that_it_was_told():
    clock = ManualClock(0.0)
    rate = RequestRate(2, clock)
    assert [taken(rate, "a") for _ in range(3)] == [True, True, False]
    assert taken(rate, "b")
    with pytest.raises(RateLimitedError) as refused:
        rate.take("a")
    clock.now += refused.value.retry_after
    assert taken(rate, "a")


def test_users_of_long_ago_are_forgotten():
    clock = ManualClock(0.0)
    rate = RequestRate(1, clock)
    for number in range(1_000):
        rate.take(str(number))
    clock.now = 61.0
    rate.take("x")
    assert len(rate._users) == 1


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, b'{"a": 1}', TurnOptions("", None)),
        ({"x-turn-type": "Side", "x-train": "no"}, b"{}", TurnOptions("side", False)),
        ({}, b'{"turn_type": "main", "train": true}', TurnOptions("main", True)),
        ({"x-train": "yes"}, b'{"train": "no"}', TurnOptions("", True)),
        ({}, b'{"messages": [{"content": "\\"train\\""}]}', TurnOptions("", None)),
        ({}, b'not "train"', TurnOptions("", None)),
        ({}, b'["train"]', TurnOptions("", None)),
    ],
)
def test_wishes_are_read_from_headers_before_fields(headers, body, expected):
    assert read_turn_options(headers, body)[0] == expected


def test_fields_of_wishes_are_taken_out_of_the_body_and_others_stay():
    _, body = read_turn_options({}, b'{"train": "yes", "a": {"train": 1}, "turn_type": "side", "session_id": "x"}')
    assert body == b'{"a":{"train":1}}'
    same = b'{ "a": 1 }'
    assert read_turn_options({}, same)[1] is same


@pytest.mark.parametrize("body", [b'{"train": 3}', b'{"train": "x"}', b'{"turn_type": 1}', b'{"turn_type": []}'])
def test_an_unknown_wish_names_its_field(body):
    with pytest.raises(InvalidFieldError) as refused:
        read_turn_options({}, body)
    assert refused.value.status == 400
    assert refused.value.fields[0].path in ("train", "turn_type")


def test_a_users_hash_is_the_same_after_a_restart_and_another_at_another_service(tmp_path):
    one, again = UserHashes.load(tmp_path / "a"), UserHashes.load(tmp_path / "a")
    other = UserHashes.load(tmp_path / "b")
    assert one.hash("alice", "t") == again.hash("alice", "t") != other.hash("alice", "t")
    assert one.hash("x", "default") != one.of_session("x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    (tmp_path / "a").write_bytes(b"short")
    with pytest.raises(ConfigurationError, match="32 bytes"):
        UserHashes.load(tmp_path / "a")


def test_no_two_users_and_no_two_clients_have_one_hash(tmp_path):
    users = UserHashes.load(tmp_path / "salt")
    clients = [("t", "chat", "vip:x1"), ("t", "chat:vip", "x1"), ("u", "chat", "vip:x1"), ("t", "chat", "vip:x1~2")]
    hashes = [users.hash(name, tenant) for name in ("alice", "default", "t") for tenant in ("default", "t", "u")]
    hashes += [users.of_client(*client) for client in clients]
    assert len(set(hashes)) == len(hashes)


@given(at=st.floats(0, 2**40), session_id=st.text(min_size=1))
def test_a_cursor_is_read_as_it_was_written(at, session_id):
    last = (at, session_id.encode("utf-8", "replace").decode())
    assert decode_cursor(encode_cursor(*last)) == last


@given(cursor=st.text(max_size=30) | st.binary(max_size=20).map(lambda data: urlsafe_b64encode(data).decode()))
@example(urlsafe_b64encode(b'["nan","s"]').decode())
@example(urlsafe_b64encode(b'["1.0",{"id":"s"}]').decode())
@example(f" {encode_cursor(1.0, 's')}")
def test_another_cursor_is_refused(cursor):
    with pytest.raises(InvalidFieldError, match="next_cursor"):
        decode_cursor(cursor)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/sessions/s/v1/messages", ("s", "/v1/messages")),
        ("/v1/sessions/a%2Fb/chat/completions", ("a/b", "/chat/completions")),
        ("/v1/sessions/s", None),
        ("/v1/sessions/s/end", None),
        ("/v1/sessions/s/feedback", None),
        ("/v1/sessions", None),
        ("/v1/sessions//end", None),
        ("/v1/runs/s/end", None),
    ],
)
def test_the_path_of_a_call_is_split_behind_the_id(path, expected):
    assert split_session_path({"path": path, "raw_path": path.encode()}) == expected


@pytest.mark.parametrize("name", ["canary", "feedback", ".", ".."])
def test_a_session_cannot_have_a_name_that_no_path_can_have(name):
    with pytest.raises(ValidationError, match="cannot stand in a path"):
        SessionRequest(session_id=name)


REQUEST = GenerateRequest(new_request_id(), [1])


class PausedPool(ManualPool):
    paused = False
    in_service = True


@dataclass
class Waiting:
    pool: PausedPool
    held: HeldPool
    signal: ChangeSignal
    registry: CollectorRegistry
    chunks: list[TokenChunk] = field(default_factory=list)
    ended: list[Generation | Exception] = field(default_factory=list)

    def change(self, *, paused: bool) -> None:
        self.pool.paused = paused
        self.signal.notify()

    async def generate(self) -> None:
        try:
            self.ended.append(await self.held.generate(REQUEST, affinity="a", on_tokens=self.chunks.append))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.ended.append(error)

    def count(self, outcome: str) -> float:
        labels = {"pool": "p", "outcome": outcome}
        return self.registry.get_sample_value("rollout_live_held_seconds_count", labels) or 0.0


@asynccontextmanager
async def waiting(seconds: float) -> AsyncIterator[Waiting]:
    pool, signal, registry = PausedPool(), ChangeSignal(), CollectorRegistry()
    held = HeldPool("p", pool, lambda: signal.next, seconds, LiveMetrics(registry))
    bench = Waiting(pool, held, signal, registry)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.generate)
            await anyio.wait_all_tasks_blocked()
            yield bench


async def test_a_request_that_nothing_holds_passes_through():
    async with waiting(0.05) as bench:
        await anyio.sleep(0.1)
        bench.pool.calls[0].finish("hi")
    [generation] = bench.ended
    assert isinstance(generation, Generation)
    assert [chunk.ids for chunk in bench.chunks] == [[104, 105]]
    assert bench.count("served") == bench.count("refused") == 0


async def test_a_pause_that_is_too_long_aborts_the_request():
    async with waiting(0.05) as bench:
        bench.change(paused=True)
    [error] = bench.ended
    assert isinstance(error, PoolHeldError)
    assert error.retry_after >= 1
    assert bench.pool.calls[0].cancelled
    assert bench.count("refused") == 1


async def test_short_pauses_are_waited_for_and_do_not_add_up():
    async with waiting(0.3) as bench:
        for _ in range(3):
            bench.change(paused=True)
            await anyio.sleep(0.15)
            bench.change(paused=False)
            await anyio.lowlevel.checkpoint()
        bench.pool.calls[0].finish("hi")
    assert isinstance(bench.ended[0], Generation)
    assert bench.count("served") == 1


async def test_tokens_that_still_come_are_no_pause():
    async with waiting(0.2) as bench:
        bench.change(paused=True)
        for _ in range(4):
            await anyio.sleep(0.1)
            bench.pool.calls[0].say("a")
            bench.signal.notify()
        bench.pool.calls[0].finish()
    assert isinstance(bench.ended[0], Generation)


@pytest.mark.parametrize(
    ("error", "kind"), [(NoBackendError("none"), PoolHeldError), (BackendRejected("no"), BackendRejected)]
)
async def test_a_pool_without_engines_is_told_as_one_to_wait_for(error, kind):
    async with waiting(5) as bench:
        bench.pool.calls[0].fail(error)
    assert type(bench.ended[0]) is kind


async def test_of_two_ratings_at_once_one_stays_and_the_other_is_a_conflict():
    none, answers, conflicts = cast(Any, None), [], []
    async with SqliteLiveStore(":memory:") as store:
        parts = RecordingParts(store, Detectors({}), none, LiveMetrics(CollectorRegistry()), none)
        sessions = LiveSessions(LiveSettings(), store, none, none, parts, none, none)
        await store.open(a_session())
        await store.record(a_turn())

        async def rate(value: float) -> None:
            try:
                answers.append((await sessions.feedback("s", SessionFeedback(value=value, turn=0))).value)
            except ConflictError as error:
                conflicts.append(error.context["value"])

        async with anyio.create_task_group() as tasks:
            for value in (1.0, -1.0):
                tasks.start_soon(rate, value)
        turn = await store.turn("s", 0)
    assert [turn.mark.value] == answers == conflicts


class Unprunable:
    def __init__(self) -> None:
        self.forgotten = anyio.Event()

    async def prune(self, *_: object) -> int:
        raise StoreError("the log cannot be emptied while another program reads the file")

    async def forget_opt_outs(self, _: float) -> None:
        self.forgotten.set()


async def test_opt_outs_are_forgotten_also_while_sessions_cannot_be_removed():
    store, none = Unprunable(), cast(Any, None)
    sessions = LiveSessions(LiveSettings(), cast(Any, store), none, none, none, none, none)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(sessions.prune)
        with anyio.fail_after(10):
            await store.forgotten.wait()
        tasks.cancel_scope.cancel()
