"""A long answer that a client gets at once, as one that repeats its request does, holds up nobody else."""

import threading
import time

import anyio
import anyio.lowlevel
import pytest
from starlette.types import Message, Receive

from api_schemas.trajectories import FinishReason
from rollout_service.gateway.contract import AnswerBegin, AnswerEnd, CallArguments, Dialect, ModelCall, TextDelta
from rollout_service.gateway.dialects import CODECS, WholeAnswer, openai_chat_answers
from rollout_service.gateway.server.delivery import AnswerResponse
from rollout_service.gateway.sessions.answer import EVENTS_AT_ONCE, LiveAnswer
from tests.support.gateway import answers

PARTS = 20


def sent_events(messages: list[Message]) -> list[int]:
    return [message["body"].count(b"data: ") for message in messages if message["type"] == "http.response.body"]


def until_sent(answer: LiveAnswer) -> Receive:
    """Return the messages of a client that stays until the end."""

    async def receive() -> Message:
        while not answer.delivered:
            await anyio.lowlevel.checkpoint()
        return {"type": "http.disconnect"}

    return receive


async def test_others_are_served_between_the_parts_of_a_long_answer():
    call = ModelCall(dialect=Dialect.CHAT, model="m", messages=(), stream=True, include_usage=False)
    answer = LiveAnswer(call, retry_seconds=0.0)
    deltas = [TextDelta(f"{number} ") for number in range(PARTS * EVENTS_AT_ONCE)]
    answer.end([AnswerBegin("k", 1), *deltas, AnswerEnd(FinishReason.STOP, answers.USAGE)])
    sent: list[Message] = []
    turns_of_others: list[int] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def other() -> None:
        while not answer.delivered:
            turns_of_others.append(len(sent))
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        tasks.start_soon(AnswerResponse(CODECS[Dialect.CHAT], call, [answer], 60.0), {}, until_sent(answer), send)
    assert len(set(turns_of_others)) > PARTS
    counts = sent_events(sent)
    assert max(counts) <= EVENTS_AT_ONCE + 1, "[DONE] has no event of its own"
    assert sum(counts) == len(deltas) + 3


def test_a_whole_answer_is_put_together_in_linear_time():
    long = [TextDelta("x" * 100)] * 20_000
    arguments = [CallArguments(0, "y" * 100)] * 20_000
    began = time.process_time()
    whole = WholeAnswer.of(answers.answer(long, [answers.call(0, "c", "f", "")[0], *arguments]))
    assert (len(whole.text), len(whole.calls[0].arguments)) == (2_000_000, 2_000_000)
    assert time.process_time() - began < 1.0, "linear work takes some milliseconds"


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_are_written_in_a_thread(monkeypatch, stream):
    def finish_reason(end: AnswerEnd, calls: int) -> str:
        threads.append(threading.current_thread())
        return finished(end, calls)

    async def send(message: Message) -> None:
        sent.append(message)

    sent: list[Message] = []
    threads: list[threading.Thread] = []
    finished = openai_chat_answers.finish_reason
    monkeypatch.setattr(openai_chat_answers, "finish_reason", finish_reason)
    for logprobs in (False, True):
        call = ModelCall(dialect=Dialect.CHAT, model="m", messages=(), stream=stream, logprobs=logprobs)
        answer = LiveAnswer(call, retry_seconds=0.0)
        answer.end(answers.answer([TextDelta("hi")]))
        await AnswerResponse(CODECS[Dialect.CHAT], call, [answer], 60.0)({}, until_sent(answer), send)
    assert [thread is threading.main_thread() for thread in threads] == [True, False]
