"""Recorded sessions are replayed, and values belong to the version that answered."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import anyio
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api_schemas.rollouts.sessions import TurnKind
from api_schemas.trajectories import FinishReason
from rollout_service.base.errors import RecordLostError
from rollout_service.engines.contract import Generation
from rollout_service.engines.shipped import policy_folder
from rollout_service.gateway.capture import PlannedTurn, TurnCapture
from rollout_service.gateway.contract import ClientMessage, ClientToolCall, Dialect, Lane, ModelCall
from rollout_service.live.contract import TurnRecord
from rollout_service.live.replay import LIVE, pack, prompt_of, rebuild
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.tokens import ChatRenderer, check_invariants
from tests.support.gateway.echoing import BASH, OTHER, write
from tests.support.live.store import a_session, a_turn, explicit, judged
from tests.support.samples import generation
from tests.support.tokens import chat_formats

RENDERER = ChatRenderer.load(policy_folder("calc-tuned"), "qwen3")
SYSTEM = ClientMessage("system", "Be brief.")
TOOLS: tuple[tuple[Any, ...], ...] = ((), (BASH,), (BASH, OTHER))


@dataclass
class Stored:
    """A session whose turns are stored as they are recorded."""

    random: Random
    is_plain: bool = False
    """Whether the client gets every answer, and none calls a tool."""
    capture: TurnCapture = field(default_factory=lambda: TurnCapture(RENDERER, LIVE))
    records: list[TurnRecord] = field(default_factory=list)
    histories: list[list[ClientMessage]] = field(default_factory=list)

    def turn(self, call: ModelCall, *, kept: bool = True) -> ClientMessage:
        planned = self.capture.plan(call)
        output = self.output(planned)
        delivered = self.is_plain or self.random.random() < 0.9
        planned.complete(output)
        body = pack(self.capture, planned, output, delivered=delivered).encode() if kept else b""
        self.records.append(record(self.capture.next_id, body))
        if kept:
            self.capture.record(planned, output, delivered=delivered)
        else:
            self.capture.skip()
        sent = planned.splitter.sent
        return ClientMessage(
            "assistant",
            sent.text,
            sent.reasoning or None,
            tuple(ClientToolCall(each.id, each.name, each.arguments) for each in sent.calls),
        )

    def output(self, planned: PlannedTurn) -> Generation:
        text = self.random.choice(["Yes.", "No.", "On it.", "Déjà vu 🙂", ""])
        calls = [("bash", '{"command": "ls"}')] if not self.is_plain and self.random.random() < 0.3 else []
        reasoning = self.random.choice(["", "Hm."])
        ids = write(RENDERER, text, *calls, reasoning=reasoning, stop=self.random.random() < 0.9)
        single = self.random.random() < 0.5
        return generation(
            ids,
            logprobs=[-0.5 if single else -self.random.random() for _ in ids],
            versions=[self.random.randint(1, 2) for _ in ids],
            finish_reason=self.random.choice([FinishReason.STOP, FinishReason.LENGTH]),
            prompt_tokens=len(planned.prompt_ids),
            cached_tokens=planned.known,
        )

    def step(self) -> None:
        random = self.random
        history = list(random.choice(self.histories)) if self.histories else [SYSTEM]
        edit = random.random()
        if edit < 0.1:
            history[0] = SYSTEM._replace(text=f"Be brief. {random.randint(0, 2)}")
        elif edit < 0.2 and len(history) > 2:
            place = random.randrange(1, len(history))
            history[place] = history[place]._replace(text="edited")
        elif edit < 0.3:
            del history[1 : random.randrange(1, len(history) + 1)]
        last = history[-1]
        history += [ClientMessage("tool", "a b", call_id=call.id, is_error=edit < 0.5) for call in last.calls]
        if not last.calls or random.random() < 0.2:
            history.append(ClientMessage("user", random.choice(["and?", "thanks", "no"])))
        call = request(history, random)
        answer = self.turn(call, kept=random.random() < 0.95)
        self.histories.append([*history, answer] if random.random() < 0.9 else history)


def request(history: list[ClientMessage], random: Random) -> ModelCall:
    return ModelCall(
        dialect=Dialect.CHAT,
        model="policy",
        messages=tuple(history),
        tools=random.choice(TOOLS),
        stop=random.choice([(), ("vu",)]),
        lane=Lane(purpose=random.choice(["", "", "", "side"])),
        json_schema=random.choice([None, None, None, {"type": "object"}]),
        kind=random.choice(["", "", "main", "side"]),
        fingerprint=random.randbytes(4),
    )


def record(turn: int, body: bytes) -> TurnRecord:
    return TurnRecord(
        session_id="s",
        turn=turn,
        kind=TurnKind.MAIN,
        answer="",
        version=1,
        truncated=False,
        malformed=0,
        recorded_at=0.0,
        body=body,
    )


def seen(planned: PlannedTurn) -> Any:
    prompt = planned.prompt
    lineage = [each.turn_id if each is not None else None for each in (prompt.parent, prompt.after)]
    follows = planned.follows.turn.turn_id if planned.follows is not None else None
    return prompt.ids, prompt.reason, lineage, planned.match.state, follows, planned.since


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 14))
@example(seed=21187, steps=11)  # a summary is followed by a turn of which nothing is kept
def test_a_rebuilt_session_goes_on_as_the_original(seed, steps):
    session = Stored(Random(seed))
    for _ in range(steps):
        session.step()
    again = rebuild(RENDERER, session.records)
    assert again.trajectory() == session.capture.trajectory()
    check_invariants(again.trajectory())
    assert again.next_id == session.capture.next_id
    for history in session.histories:
        call = request([*history, ClientMessage("user", "go on")], session.random)
        assert seen(again.plan(call)) == seen(session.capture.plan(call))
    assert again.trajectory() == session.capture.trajectory()


def test_a_long_session_is_stored_in_its_own_size():
    session = Stored(Random(1), is_plain=True)
    history = [SYSTEM]
    for number in range(60):
        history.append(ClientMessage("user", f"question {number}, {session.random.randbytes(40).hex()}"))
        answer = session.turn(ModelCall(dialect=Dialect.CHAT, model="p", messages=tuple(history), tools=(BASH,)))
        history.append(answer)
    sizes = [len(each.body) for each in session.records]
    assert max(sizes[1:]) < 1_500
    assert sum(sizes[50:]) < 1.2 * sum(sizes[1:11])


def test_a_prompt_is_given_with_its_messages_and_exact_ids():
    session = Stored(Random(3), is_plain=True)
    history = [SYSTEM, ClientMessage("user", "one")]
    answer = session.turn(ModelCall(dialect=Dialect.CHAT, model="p", messages=tuple(history), tools=(BASH,)))
    history += [answer, ClientMessage("user", "two")]
    planned = session.capture.plan(ModelCall(dialect=Dialect.CHAT, model="p", messages=tuple(history), tools=(BASH,)))
    session.turn(ModelCall(dialect=Dialect.CHAT, model="p", messages=tuple(history), tools=(BASH,)))
    prompt = prompt_of(RENDERER, session.records, 1)
    assert prompt.prompt_ids == list(planned.prompt_ids)
    assert [message.role for message in prompt.messages] == ["system", "user", "assistant", "user"]
    assert prompt.messages[-1].content == "two"
    assert list(prompt.tools) == [BASH]
    assert prompt.output_ids == session.capture.turns[1].turn.output_ids


def test_calls_of_tools_that_were_found_later_are_read_again_by_their_schemas(tmp_path):
    renderer = chat_formats.load(tmp_path, "qwen3.5")
    capture = TurnCapture(renderer, LIVE)
    call = ModelCall(
        dialect=Dialect.ANTHROPIC,
        model="p",
        messages=(ClientMessage("user", "go"),),
        tools=(OTHER,),
        deferred_tools=(BASH,),
    )
    planned = capture.plan(call)
    ids = write(renderer, "On it.", ("bash", '{"command": "5", "timeout": 5}'))
    output = generation(ids, prompt_tokens=len(planned.prompt_ids))
    planned.complete(output)
    body = pack(capture, planned, output, delivered=True).encode()
    capture.record(planned, output, delivered=True)
    again = rebuild(renderer, [record(0, body)])
    assert again.turns[0].turn.message.tool_calls[0].arguments == {"command": "5", "timeout": 5}
    assert again.trajectory() == capture.trajectory()


def test_nothing_is_told_of_a_turn_without_a_body():
    session = Stored(Random(0))
    call = ModelCall(dialect=Dialect.CHAT, model="p", messages=(ClientMessage("user", "secret"),))
    session.turn(call, kept=False)
    with pytest.raises(RecordLostError):
        prompt_of(RENDERER, session.records, 0)


@given(data=st.binary(max_size=64))
def test_a_damaged_turn_is_an_error_of_its_own(data):
    with pytest.raises(RecordLostError):
        rebuild(RENDERER, [record(0, b"\x01" + data)])


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
