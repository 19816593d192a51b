"""A session under clients that go away, come back, ask twice, ask too much, or outlive their rollout."""

import threading
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from api_schemas.rollouts import Sampling, StopReason
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.engines.contract import Generation
from rollout_service.engines.errors import NoBackendError, PromptTooLong
from rollout_service.episodes import EpisodeLimits
from rollout_service.gateway.contract import (
    AnswerBegin,
    AnswerEnd,
    AnswerEvent,
    ClientMessage,
    ClientToolCall,
    Dialect,
    ModelCall,
    TextDelta,
)
from rollout_service.gateway.errors import ContextOverflowError, RolloutEndedError
from rollout_service.gateway.metrics import GatewayMetrics
from rollout_service.gateway.sessions.answer import LiveAnswer, TokenBudget, TokensSpentError
from rollout_service.gateway.sessions.engines import UNSTREAMED_CHUNK
from rollout_service.gateway.sessions.session import INLINE_BYTES, INLINE_IDS, GatewaySession
from tests.support.gateway.asgi import open_session
from tests.support.gateway.manual_pool import CharacterAnswer, CharacterCapture, ManualPool

LONG = 3_600.0


def call(text: str, **fields: Any) -> ModelCall:
    """Return a call with one message; equal texts are the same request."""
    return ModelCall(
        dialect=Dialect.CHAT,
        model="policy",
        messages=(ClientMessage("user", text),),
        fingerprint=text.encode(),
        **fields,
    )


@dataclass
class Bench:
    session: GatewaySession
    pool: ManualPool
    capture: CharacterCapture
    registry: CollectorRegistry

    def count(self, outcome: str) -> float:
        labels = {"dialect": "openai_chat", "client": "", "outcome": outcome}
        return self.registry.get_sample_value("rollout_gateway_calls_total", labels) or 0.0


@asynccontextmanager
async def bench(
    *, retry_seconds: float = LONG, context_length: int = 1_000, hidden: Collection[str] = (), **limits: int
) -> AsyncIterator[Bench]:
    pool, capture, registry = ManualPool(), CharacterCapture(), CollectorRegistry()
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            session = open_session(
                capture,
                pool,
                tasks,
                limits=EpisodeLimits(**limits),
                metrics=GatewayMetrics(registry),
                retry_seconds=retry_seconds,
                context_length=context_length,
                hidden=hidden,
            )
            yield Bench(session, pool, capture, registry)
            await session.end()
            tasks.cancel_scope.cancel()


async def read(answer: LiveAnswer) -> str:
    """Read an answer to its end, as a client does, and return its text."""
    with answer.reading():
        seen = 0
        while True:
            events = await answer.after(seen, LONG)
            if not events and answer.error is not None:
                raise answer.error
            seen += len(events)
            if isinstance(events[-1], AnswerEnd):
                answer.delivered = True
                return text_of(answer)


def text_of(answer: LiveAnswer) -> str:
    return "".join(event.text for event in answer.events if isinstance(event, TextDelta))


async def test_tokens_are_told_as_they_come_and_the_turn_is_recorded_before_its_end():
    async with bench() as b:
        answer = await b.session.answer(call("hi", stream=True))
        engine = await b.pool.call(0)
        with answer.reading():
            engine.say("a")
            assert text_of(answer) == "a"
            engine.say("b")
            assert text_of(answer) == "ab"
            assert not b.capture.recorded
            engine.finish()
            await answer.until_whole()
            assert b.capture.recorded == [("ab", True)]
        assert isinstance(answer.events[-1], AnswerEnd)
        assert b.session.usage.sampled_tokens == 2


@pytest.mark.parametrize("size", [0, INLINE_BYTES + 1])
async def test_the_policy_is_told_no_secret_that_a_program_sends(size):
    async with bench(hidden={"secret-key"}) as b:
        sent = ClientToolCall(None, "look", '{"with": "secret-key"}')
        messages = (
            ClientMessage("user", "secret-key?", calls=(sent,)),
            ClientMessage("tool", "a secret-key"),
        )
        asked = replace(call("hi", size=size), messages=messages)
        answer = await b.session.answer(asked)
        engine = await b.pool.call(0)
        assert "".join(map(chr, engine.request.input_ids)) == "***?a ***"
        assert await b.session.count_tokens(asked) == len("***?a ***")
        assert answer.call.messages[0].calls[0].arguments == '{"with": "***"}'
        engine.finish()
        await read(answer)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ends_unread", [False, True])
async def test_a_client_that_comes_back_gets_the_whole_answer_that_it_lost(ends_unread, stream):
    async with bench() as b:
        lost = await b.session.answer(call("hi"))
        engine = await b.pool.call(0)
        with lost.reading():
            engine.say("first half, ")
        engine.say("second half")
        if ends_unread:
            engine.finish()
        again = await b.session.answer(call("hi", stream=stream))
        engine.finish()
        assert await read(again) == "first half, second half"
        assert len(b.pool.calls) == 1
        assert b.capture.recorded == [("first half, second half", True)]
        assert b.count("repeated") == 1


async def test_a_client_that_does_not_come_back_is_given_up_and_its_tokens_are_kept():
    async with bench(retry_seconds=0.0) as b:
        lost = await b.session.answer(call("hi"))
        engine = await b.pool.call(0)
        with lost.reading():
            engine.say("half")
        await b.pool.cancelled(0)
        await b.session.end()
        assert b.capture.recorded == [("half", False)]
        assert b.count("abandoned") == 1


async def test_an_answer_that_begins_as_its_client_goes_away_is_given_up():
    answer = LiveAnswer(call("hi"), retry_seconds=0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer.begun)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        answer.end([AnswerBegin("key", 1)])
    with anyio.fail_after(5), answer.scope:
        await answer.until_read()
    assert answer.is_forgotten


async def test_equal_requests_of_two_programs_get_an_answer_each():
    async with bench() as b:
        first = await b.session.answer(call("hi"))
        with first.reading():
            second = await b.session.answer(call("hi"))
            assert second is not first
            (await b.pool.call(0)).finish("one")
            (await b.pool.call(1)).finish("two")
            assert await read(second) == "two"
        assert sorted(b.capture.recorded) == [("one", True), ("two", True)]


async def test_equal_requests_that_come_at_once_get_an_answer_each():
    answers = []

    async def ask(b: Bench) -> None:
        answers.append(await read(await b.session.answer(call("hi"))))

    async with bench() as b, anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(ask, b)
        for number, text in enumerate(("one", "two")):
            (await b.pool.call(number)).finish(text)
    assert sorted(answers) == ["one", "two"]


async def test_a_request_that_was_answered_to_its_end_is_sampled_again():
    async with bench() as b:
        for number, text in enumerate(["one", "two"]):
            answer = await b.session.answer(call("hi"))
            (await b.pool.call(number)).finish(text)
            assert await read(answer) == text


async def test_limits_end_the_task_with_a_text_and_are_told_to_the_episode():
    async with bench(max_turns=1) as b:
        answer = await b.session.answer(call("one"))
        closing = await b.session.answer(call("meanwhile"))
        assert "turns" in await read(closing)
        (await b.pool.call(0)).finish("x")
        await read(answer)
        assert "turns" in await read(await b.session.answer(call("two")))
        assert b.session.stop_reason is StopReason.MAX_TURNS
        assert b.session.usage.turns == 1
        assert b.count("limit") == 2


async def test_the_budget_is_the_least_of_context_limits_and_request():
    async with bench(context_length=100, max_tokens=40, max_turn_tokens=30) as b:
        for number, (text, wanted, budget) in enumerate(
            [("a", None, 30), ("b", 7, 7), ("c" * 80, 50, 19), ("d", 50, 15)]
        ):
            answer = await b.session.answer(call(text, max_tokens=wanted))
            engine = await b.pool.call(number)
            assert engine.request.sampling.max_new_tokens == budget, text[0]
            engine.finish("x" * (25 if number == 2 else 0))
            await read(answer)


async def test_calls_at_once_share_the_tokens_of_their_rollout():
    async with bench(max_turns=99, max_tokens=40, max_turn_tokens=30) as b:
        answers = [await b.session.answer(call(f"q{n}")) for n in range(4)]
        await anyio.wait_all_tasks_blocked()
        assert [each.request.sampling.max_new_tokens for each in b.pool.calls] == [30]
        b.pool.calls[0].finish("x" * 5)
        await read(answers[0])
        second = await b.pool.call(1)
        assert second.request.sampling.max_new_tokens == 30, "it is not cut short for what another may return"
        second.finish("x" * 29)
        await read(answers[1])
        third = await b.pool.call(2)
        assert third.request.sampling.max_new_tokens == 6, "nobody else may return some"
        third.finish("x" * 6)
        await read(answers[2])
        assert "tokens" in await read(answers[3])
        assert b.session.stop_reason is StopReason.MAX_TOKENS
        assert (b.session.usage.turns, b.session.usage.sampled_tokens) == (3, 40)
        assert b.count("limit") == 1


async def test_a_call_that_is_cut_off_returns_the_tokens_that_it_did_not_use():
    async with bench(retry_seconds=0.0, max_tokens=40, max_turn_tokens=40) as b:
        lost = await b.session.answer(call("hi"))
        (await b.pool.call(0)).say("half")
        waiting = await b.session.answer(call("ho"))
        with lost.reading():
            pass
        assert (await b.pool.call(1)).request.sampling.max_new_tokens == 36
        b.pool.calls[1].fail(NoBackendError("none"))
        with pytest.raises(NoBackendError):
            await read(waiting)


CALLS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12)


@given(CALLS, st.integers(1, 120))
async def test_calls_at_once_never_sample_more_than_their_rollout_may(calls, most):
    budget, sampled, short = TokenBudget(most), 0, 0

    async def sample(wanted: int, used: int) -> None:
        nonlocal sampled, short
        try:
            reserved = await budget.reserve(wanted)
        except TokensSpentError:
            short += 1
            return
        for _ in range(used):
            await anyio.lowlevel.checkpoint()
        sampled += min(used, reserved)
        short += reserved < min(wanted, used)
        budget.settle(reserved, min(used, reserved))

    async with anyio.create_task_group() as tasks:
        for wanted, used in calls:
            tasks.start_soon(sample, wanted, used)
    assert sampled <= most
    assert not short or sampled == most, "no call is cut short while tokens are left"


async def test_a_prompt_over_the_context_is_refused_and_the_rollout_goes_on():
    async with bench(context_length=10) as b:
        with pytest.raises(ContextOverflowError, match="10"):
            await b.session.answer(call("x" * 10))
        answer = await b.session.answer(call("by the engine"[:5]))
        with answer.reading():
            (await b.pool.call(0)).fail(PromptTooLong("too long"))
            await answer.until_whole()
        assert isinstance(answer.error, ContextOverflowError)
        assert b.session.usage.turns == 0
        assert b.count("overflow") == 2


async def test_a_call_without_an_engine_fails_the_rollout():
    async with bench() as b:
        answer = await b.session.answer(call("hi"))
        (await b.pool.call(0)).fail(NoBackendError("none"))
        with pytest.raises(NoBackendError):
            await read(answer)
        with pytest.raises(NoBackendError):
            await b.session.until_failed()
        with answer.reading():
            repeated = await b.session.answer(call("hi"))
        assert repeated is not answer, "what failed is not given again"


async def test_the_end_of_the_agent_cuts_off_its_calls():
    async with bench() as b:
        answer = await b.session.answer(call("hi"))
        (await b.pool.call(0)).say("half")
        with answer.reading():
            await b.session.end()
        assert isinstance(answer.error, RolloutEndedError)
        assert b.capture.recorded == [("half", False)]
        with pytest.raises(RolloutEndedError):
            await b.session.answer(call("later"))
        assert b.pool.released
        with pytest.raises(EnvironmentFailedError):
            await b.session.respond([], max_tokens=1)


async def test_a_client_samples_as_the_rollout_says():
    async with bench() as b:
        asked = call("hi", requested={"temperature": 0.0}, stop=("END",), json_schema={"type": "object"})
        await b.session.answer(asked)
        sampling = (await b.pool.call(0)).request.sampling
        assert (sampling.temperature, sampling.stop, sampling.json_schema) == (
            1.0,
            ("END",),
            '{"type":"object"}',
        )
        b.session._engines = replace(b.session._engines, obey_sampling=True)
        await b.session.answer(call("ho", requested={"temperature": 0.0, "top_k": 64, "top_p": 7}))
        sampling = (await b.pool.call(1)).request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 64, 1.0)


async def test_a_large_request_is_planned_in_a_thread_whatever_makes_it_large():
    class NotingCapture(CharacterCapture):
        def plan(self, call: ModelCall, context_length: int | None = None) -> CharacterAnswer:
            threads.append(threading.current_thread())
            return super().plan(call, context_length)

    threads: list[threading.Thread] = []
    async with bench() as b:
        b.session._capture = NotingCapture()
        await b.session.count_tokens(call("hi", size=INLINE_BYTES))
        await b.session.count_tokens(call("hi", size=INLINE_BYTES + 1))
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_a_long_answer_is_read_in_a_thread(monkeypatch):
    def finish(answered: CharacterAnswer, generation: Generation) -> list[AnswerEvent]:
        threads.append(threading.current_thread())
        return finished(answered, generation)

    threads: list[threading.Thread] = []
    finished = CharacterAnswer.finish
    monkeypatch.setattr(CharacterAnswer, "finish", finish)
    async with bench(max_tokens=10 * INLINE_IDS) as b:
        for number, length in enumerate((INLINE_IDS, INLINE_IDS + 1)):
            answer = await b.session.answer(call("hi"))
            (await b.pool.call(number)).finish("x" * length)
            assert await read(answer) == "x" * length
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_the_answers_to_one_request_have_seeds_of_their_own():
    async with bench() as b:
        b.session._engines = replace(b.session._engines, sampling=Sampling(seed=7))
        for sibling in range(3):
            await b.session.answer(replace(call("hi"), sibling=sibling, fingerprint=bytes([sibling])))
        seeds = [(await b.pool.call(number)).request.sampling.seed for number in range(3)]
        assert seeds[0] == 7
        assert len(set(seeds)) == 3


async def test_chunks_may_be_larger_when_no_client_waits_for_them():
    async with bench() as b:
        await b.session.answer(call("hi"))
        await b.session.answer(call("ho", stream=True))
        chunks = [(await b.pool.call(number)).request.chunk_tokens for number in range(2)]
        assert chunks == [UNSTREAMED_CHUNK, 1]


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "leave", "say", "finish"]), st.integers(0, 3)), min_size=1, max_size=40
)


@given(STEPS)
async def test_whatever_clients_do_each_sampled_token_is_recorded_once(steps):
    """Clients ask, go away and repeat at random; what one received is what was recorded, once."""
    async with bench() as b:
        reading: dict[int, LiveAnswer] = {}
        contexts: dict[int, Any] = {}
        for step, who in steps:
            if step == "ask" and who not in reading:
                answer = await b.session.answer(call(f"request {who}"))
                reading[who], contexts[who] = answer, answer.reading()
                contexts[who].__enter__()
            elif step == "leave" and who in reading:
                contexts.pop(who).__exit__(None, None, None)
                del reading[who]
            elif step == "say" and who < len(b.pool.calls) and not b.pool.calls[who].ended.is_set():
                b.pool.calls[who].say(chr(ord("a") + who))
            elif step == "finish" and who in reading:
                answer = reading.pop(who)
                number = next(i for i, one in enumerate(b.pool.calls) if one.on_tokens == answer.feed)
                b.pool.calls[number].finish(".")
                await answer.until_whole()
                answer.delivered = True
                contexts.pop(who).__exit__(None, None, None)
        for context in contexts.values():
            context.__exit__(None, None, None)
        await b.session.end()
        kept = sorted(text for text, _ in b.capture.recorded)
        assert kept == sorted(one.said for one in b.pool.calls if one.said)
        assert b.session.usage.turns == len(kept)
