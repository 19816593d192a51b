"""What was not to be stored is known again, in whatever form a client sends it."""

import threading
from dataclasses import replace
from typing import Any, cast

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts.sessions import TurnKind
from rollout_service.gateway.capture import TurnCapture
from rollout_service.gateway.capture.history import MAX_VALUES
from rollout_service.gateway.capture.text_stream import SentAnswer
from rollout_service.gateway.contract import ClientMessage, ClientToolCall, Dialect, ModelCall
from rollout_service.live.consent import MIN_PARAGRAPH, ConversationConsent, MessageHashes
from rollout_service.live.contract import MAX_DIGESTS, OptOuts
from rollout_service.live.detectors import Detectors
from rollout_service.live.recorder import RecordingParts, SessionRecorder
from rollout_service.live.register import RateLimitedError, SessionRegister, UserHashes
from rollout_service.live.replay import LIVE
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.settings.live import LiveSettings
from tests.support.live.store import a_session
from tests.support.waiting import collect
from tests.unit.live.test_replay import RENDERER

HASHES = MessageHashes(b"k" * 32)
TEXTS = st.text(min_size=MIN_PARAGRAPH, max_size=60).filter(
    lambda text: len(text.strip()) >= MIN_PARAGRAPH and "\n\n" not in text
)


def said(role: Any, text: str = "", *calls: tuple[str, str]) -> ClientMessage:
    return ClientMessage(role, text, calls=tuple(ClientToolCall(None, *call) for call in calls))


@given(
    text=TEXTS,
    before=st.text(max_size=20),
    after=st.text(max_size=20),
    role=st.sampled_from(["user", "tool"]),
)
def test_a_text_is_known_again_among_others(text, before, after, role):
    refused = HASHES.of_messages([said("user", text)])
    joined = said(role, f"{before}\n\n{text}\n\n{after}")
    assert refused & HASHES.of_messages([joined])
    assert refused & HASHES.of_messages([said("assistant", f" {text}\n")])


def test_an_answer_is_known_again_by_its_text_and_by_the_values_of_its_calls():
    sent = SentAnswer(text="On it.")
    sent.begin_call("call_1", "look", 0)
    sent.add_arguments('{"at": 1, "by": "a"}')
    refused = HASHES.of_answer(sent)
    assert refused & HASHES.of_messages([said("assistant", "On it.")])
    assert refused & HASHES.of_messages([said("assistant", "", ("look", '{"by":"a","at":1.0}'))])
    assert not refused & HASHES.of_messages([said("assistant", "", ("look", '{"at": 2}'))])


def test_arguments_of_too_many_values_are_not_read():
    many = "[" + "[]," * MAX_VALUES + "1 ]"
    assert not HASHES.of_messages([said("assistant", "", ("look", many))]) & HASHES.of_messages(
        [said("assistant", "", ("look", many.replace(" ", "")))]
    )


@pytest.mark.parametrize("length", [10, 100_000])
async def test_what_is_long_is_read_in_a_thread(length):
    """Whether it is a text, or the arguments of a call."""
    main, threads = threading.current_thread(), []

    class Noting(str):
        def strip(self, *_: Any) -> str:
            threads.append(threading.current_thread())
            return str(self)

    class NotingHashes(MessageHashes):
        def of_messages(self, messages: Any) -> frozenset[bytes]:
            threads.append(threading.current_thread())
            return super().of_messages(messages)

    consent = ConversationConsent("c", NotingHashes(b"k"), OptOuts())
    await consent.refuse([said("assistant", "", ("look", "x" * length))])
    async with SqliteLiveStore(":memory:") as store:
        parts = cast(Any, RecordingParts(store, Detectors({}), HASHES, cast(Any, None), cast(Any, None)))
        recorder = SessionRecorder(a_session(), cast(Any, None), parts, consent, TurnKind.MAIN)
        await recorder._set_next_state(0, [said("tool", Noting("x" * length))], {})
    assert len(threads) == 2
    assert {thread is main for thread in threads} == {length == 10}


def test_instructions_and_what_says_nothing_are_not_remembered():
    assert not HASHES.of_messages([said("system", "Be brief, whatever happens."), said("user", " \n ")])


def test_hashes_say_nothing_without_their_key():
    assert not HASHES.of_messages([said("user", "yes")]) & MessageHashes(b"l" * 32).of_messages([said("user", "yes")])


async def test_where_not_all_is_known_only_what_begins_anew_is_stored():
    consent = ConversationConsent("c", HASHES, OptOuts(is_complete=False))
    for messages, is_allowed in (
        ([said("system", "s"), said("user", "a")], True),
        ([said("user", "a"), said("user", "b")], False),
        ([said("user", "a"), said("assistant", "x"), said("user", "b")], False),
    ):
        call = ModelCall(dialect=Dialect.CHAT, model="m", messages=tuple(messages))
        planned = TurnCapture(RENDERER, LIVE).plan(call)
        assert await consent.allows(planned) is is_allowed, messages
        whole = replace(consent, refused=OptOuts())
        assert await whole.allows(planned)


async def test_a_conversation_has_no_more_opt_outs_in_memory_than_in_the_store():
    consent = ConversationConsent("c", HASHES, OptOuts())
    for round_ in range(2):
        text = "\n\n".join(f"paragraph {round_} {number:06}" for number in range(MAX_DIGESTS))
        added = await consent.refuse([said("user", text)])
        assert len(added.digests) == MAX_DIGESTS + 1
        assert (len(consent.refused.digests), consent.refused.is_complete) == (MAX_DIGESTS, False)


async def test_a_conversation_of_which_nothing_is_known_is_not_taken_for_agreed(tmp_path):
    users = UserHashes.load(tmp_path / "salt")
    async with SqliteLiveStore(":memory:") as store:
        register = SessionRegister(LiveSettings(), store, users, cast(Any, None), lambda: 0.0)
        await register.add(a_session("here"))
        await register.add(a_session("from here", continues="here"))
        await register.add(a_session("from elsewhere", continues="there"))
        assert (await register.opt_outs_of("from here")).is_complete
        assert not (await register.opt_outs_of("from elsewhere")).is_complete


async def test_the_last_place_is_for_all_requests_that_open_the_same_session(tmp_path):
    async with SqliteLiveStore(":memory:") as store:
        settings = LiveSettings(max_sessions=1)
        register = SessionRegister(settings, store, UserHashes.load(tmp_path / "salt"), cast(Any, None), lambda: 0.0)
        opened: list[bool] = []
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(collect, opened, lambda: register.add(a_session()))
        assert sorted(opened) == [False, False, True]
        with pytest.raises(RateLimitedError):
            await register.add(a_session("another"))


async def test_clients_refuse_for_themselves_alone_whatever_their_names_join_to(tmp_path):
    users = UserHashes.load(tmp_path / "salt")
    async with SqliteLiveStore(":memory:") as store:
        register = SessionRegister(LiveSettings(), store, users, cast(Any, None), lambda: 0.0)
        mine = [replace(a_session(f"chat:vip:x{end}"), client="mine") for end in ("", "~3")]
        other = replace(a_session("chat:vip:x~2"), client="another's")
        for record in (*mine, other):
            await register.add(record)
        await store.opt_out(register.conversation_of(mine[0]), OptOuts(frozenset({b"8 bytes."})), 0.0)
        assert await register.opt_outs_of(other.session_id) == OptOuts()
        assert (await register.opt_outs_of(mine[1].session_id)).digests == {b"8 bytes."}
