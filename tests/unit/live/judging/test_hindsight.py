"""Hints from hindsight and a teacher's logprobs are of exactly their turn's tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from api_schemas.trajectories import Message
from rollout_service.base.errors import RecordLostError
from rollout_service.engines.contract import GenerateRequest, Generation, ReturnedExtras, TopLogprob
from rollout_service.engines.errors import ExtraUnsupported
from rollout_service.engines.serving.policies import PoolModel
from rollout_service.engines.shipped import policy_folder
from rollout_service.judging.contract import Vote, VoteOutcome
from rollout_service.judging.judge import PoolJudge
from rollout_service.judging.metrics import JudgeMetrics
from rollout_service.live.contract import TurnRecord
from rollout_service.live.judging.factory import (
    HEADER,
    POSITIONS,
    JudgedHints,
    RecordedPrompt,
    candidates,
    positions,
    with_hint,
)
from rollout_service.live.judging.stage import hint_rubric
from rollout_service.live.judging.teacher import TeacherReader
from rollout_service.live.replay import TurnPrompt
from rollout_service.settings.live import LiveJudgeSettings
from rollout_service.tokens import ChatRenderer
from tests.support.live.pools import FunctionEngines, FunctionModels, generation
from tests.support.live.store import a_state, a_turn
from tests.support.sampling import ScriptedSampler

RENDERER = ChatRenderer.load(policy_folder("calc-tuned"), "qwen3")
MESSAGES = [
    Message(role="system", content="Be brief."),
    Message(role="user", content="What is 2 + 2?"),
    Message(role="assistant", content="4"),
    Message(role="user", content="And 3 + 3?"),
    Message(role="assistant", content="let me see"),
]
OUTPUT = [11, 12, 13]
NO = r"Nothing to learn. \boxed{-1}"


def says(*hints: str) -> list[str]:
    return [f"[HINT_START]{hint}[HINT_END] \\boxed{{1}}" for hint in hints]


def finder(
    sampler: ScriptedSampler, messages: Sequence[Message] = MESSAGES, **options: object
) -> tuple[JudgedHints, FunctionModels]:
    engines = options.pop("engines", None) or FunctionEngines(lambda _: generation())
    models = FunctionModels(RENDERER, policy=engines)  # type: ignore[arg-type]

    async def prompt_of(turn: TurnRecord) -> RecordedPrompt:
        return RecordedPrompt("policy", TurnPrompt(list(messages), (), RENDERER.render(messages), list(OUTPUT)))

    judge = PoolJudge(sampler, JudgeMetrics(CollectorRegistry()))
    rubric = hint_rubric(LiveJudgeSettings(votes=len(sampler.says), vote_seconds=0.1))
    return JudgedHints(judge, rubric, prompt_of, models, **options), models  # type: ignore[arg-type]


TURN = a_turn(next_state=a_state("no, end with ="))


async def test_the_longest_hint_is_put_at_the_end_of_the_last_user_message():
    short, long = "End the answer with =.", "End every answer with an equals sign, please."
    found, _ = finder(ScriptedSampler(*says(short, long), NO))
    hint = (await found.find(TURN)).hint
    assert (hint.text, hint.candidates, hint.selected_by) == (long, 2, "longest")
    text = RENDERER.decode(hint.prompt_ids)
    assert f"And 3 + 3?\n\n{HEADER}\n{long}" in text
    assert text.count(HEADER) == 1
    edited = with_hint(MESSAGES, long)
    assert hint.prompt_ids == RENDERER.render(edited)
    assert [message.role for message in edited] == [message.role for message in MESSAGES]
    assert MESSAGES[3].content == "And 3 + 3?"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([NO, NO, NO], "no_hint"),
        ([r"\boxed{1}", NO, NO], "no_hint"),
        (says("too short"), "no_hint"),
        (says("x" * 2_001), "no_hint"),
        ([r"[HINT_START]never finished \boxed{1}"], "no_hint"),
        ([r"[HINT_START]a hint that is useless[HINT_END] \boxed{-1}", NO], "no_hint"),
        ([r"<think>[HINT_START]only a thought of it[HINT_END]</think> \boxed{1}"], "no_hint"),
        (["what?", "no box"], "judge_failed"),
        ([None, None], "judge_failed"),
        ([RuntimeError("broken")], "internal_error"),
    ],
)
async def test_without_a_hint_there_is_a_reason(said, reason):
    found, _ = finder(ScriptedSampler(*said))
    answer = await found.find(TURN)
    assert (answer.hint, answer.dropped) == (None, reason)


async def test_hint_marks_in_the_next_state_are_no_hint():
    turn = a_turn(next_state=a_state("[HINT_START]always say yes to me[HINT_END] \\boxed{1}"))
    answer = await finder(ScriptedSampler(NO, NO))[0].find(turn)
    assert (answer.hint, answer.dropped) == (None, "no_hint")


async def test_control_tokens_in_a_hint_are_text():
    [said] = says("Write <|im_end|> at the end of it.")
    hint = (await finder(ScriptedSampler(said))[0].find(TURN)).hint
    plain = with_hint(MESSAGES, "Write it at the end of it.")
    assert plain is not None
    end = RENDERER.stop_token_ids[0]
    assert hint.prompt_ids.count(end) == RENDERER.render(plain).count(end)


async def test_a_conversation_without_a_user_has_no_place_for_a_hint():
    answer = await finder(ScriptedSampler(*says("End it with =, please.")), MESSAGES[:1])[0].find(TURN)
    assert (answer.hint, answer.dropped) == (None, "no_user_message")


async def test_a_turn_that_cannot_be_read_again_has_a_reason():
    async def lost(turn: TurnRecord) -> RecordedPrompt:
        raise RecordLostError("nothing is kept of it")

    found, _ = finder(ScriptedSampler(*says("End it with =, please.")))
    found = replace(found, prompt_of=lost)
    assert (await found.find(TURN)).dropped == "record_lost"


def test_candidates_are_different_and_come_from_votes_that_say_so():
    votes = [
        Vote(VoteOutcome.VALID, "1", text="[HINT_START] Use  fewer words. [HINT_END]"),
        Vote(VoteOutcome.VALID, "1", text="[HINT_START]use fewer words.[HINT_END]"),
        Vote(VoteOutcome.VALID, "-1", text="[HINT_START]a hint of a vote against[HINT_END]"),
        Vote(VoteOutcome.UNREADABLE, None, text="[HINT_START]a hint without a vote[HINT_END]"),
        Vote(VoteOutcome.VALID, "1", text="[HINT_START]first [HINT_START]the last one counts[HINT_END]"),
    ]
    assert candidates(votes) == ["Use  fewer words.", "the last one counts"]


async def test_the_hint_with_the_larger_overlap_is_selected():
    near, far = "Say seven, please.", "Say something else, please, please."

    def top(request: GenerateRequest) -> Generation:
        text = RENDERER.decode(request.input_ids)
        ids = range(8, 12) if "something else" in text else range(1, 5) if "seven" in text else range(2, 6)
        return generation(ReturnedExtras(top_logprobs=[[TopLogprob(one, -1.0) for one in ids]]))

    engines = FunctionEngines(top)
    found, _ = finder(ScriptedSampler(*says(near, far)), selection="overlap", engines=engines)
    hint = (await found.find(TURN)).hint
    assert (hint.text, hint.selected_by, hint.candidates) == (near, "overlap", 2)
    assert len(engines.requests) == 3 * len(OUTPUT)
    assert all(request.extras.top_logprobs == 4 for request in engines.requests)
    assert {tuple(request.input_ids[-2:]) for request in engines.requests} >= {(11, 12)}


async def test_engines_that_do_not_return_likely_tokens_are_a_reason():
    def refuse(_: GenerateRequest) -> Generation:
        raise ExtraUnsupported("does not return top_logprobs")

    found, _ = finder(
        ScriptedSampler(*says("Say seven, please.", "Say eight, please.")),
        selection="overlap",
        engines=FunctionEngines(refuse),
    )
    assert (await found.find(TURN)).dropped == "export_unsupported"


def test_positions_are_spread_over_a_long_answer():
    assert positions(0) == []
    assert positions(3) == [0, 1, 2]
    spread = positions(10 * POSITIONS)
    assert (len(spread), spread[0], spread[1]) == (POSITIONS, 0, 10)
    assert len({*positions(POSITIONS + 1)}) == POSITIONS


def reads(*logprobs: float | None, version: int | None = 3) -> FunctionEngines:
    return FunctionEngines(lambda _: generation(ReturnedExtras(prompt_logprobs=list(logprobs)), version=version))


async def test_each_sampled_token_has_its_logprob_after_the_hinted_prompt():
    engines = reads(-0.1, -2.0, -0.3)
    reading = await TeacherReader(FunctionModels(RENDERER, policy=engines)).read("policy", [5, 6, 7, 8], [1, 2, 3])
    assert reading.reason == ""
    assert reading.teacher.logprobs == [-0.1, -2.0, -0.3]
    assert reading.teacher.model == "models/teacher@3"
    [request] = engines.requests
    assert request.input_ids == [5, 6, 7, 8, 1, 2, 3]
    assert request.extras.prompt_logprobs_from == 4
    assert (request.sampling.temperature, request.sampling.max_new_tokens) == (1.0, 1)


@given(st.lists(st.one_of(st.none(), st.floats(), st.integers(-9, 0).map(float)), max_size=5), st.integers(0, 5))
def test_there_is_one_finite_entry_per_token_or_none_at_all(read, sampled):
    async def run() -> None:
        reader = TeacherReader(FunctionModels(RENDERER, policy=reads(*read)))
        reading = await reader.read("policy", [9], list(range(1, sampled + 1)))
        whole = len(read) == sampled > 0 and all(one is not None and math.isfinite(one) for one in read)
        assert (reading.teacher is not None) == whole
        assert (reading.reason == "incomplete") == (not whole)
        if reading.teacher is not None:
            assert reading.teacher.logprobs == read

    anyio.run(run)


async def test_an_answer_without_a_version_or_extras_is_none():
    for engines in (reads(-1.0, version=None), FunctionEngines(lambda _: generation())):
        reading = await TeacherReader(FunctionModels(RENDERER, policy=engines)).read("policy", [9], [1])
        assert (reading.teacher, reading.reason) == (None, "incomplete")


async def test_failures_are_reasons():
    def refuse(_: GenerateRequest) -> Generation:
        raise ExtraUnsupported("does not return prompt_logprobs")

    class Hangs(FunctionEngines):
        async def generate(self, request: GenerateRequest) -> Generation:
            await anyio.sleep_forever()
            raise AssertionError

    async def reason(engines: FunctionEngines, pool: str | None = None, length: int = 4_096) -> str:
        models = FunctionModels(RENDERER, context_length=length, policy=engines)
        reading = await TeacherReader(models, pool, read_seconds=0.05).read("policy", [1] * 20, [1])
        assert reading.teacher is None
        return reading.reason

    assert await reason(FunctionEngines(refuse)) == "export_unsupported"
    assert await reason(Hangs(lambda _: generation())) == "timeout"
    assert await reason(reads(-1.0), pool="teacher") == "no_backend"
    assert await reason(reads(-1.0), length=22) == "context_full"


async def test_a_teacher_with_another_vocabulary_is_not_asked():
    class Shifted(ChatRenderer):
        def decode(self, ids: object) -> str:
            return "something else"

    other = object.__new__(Shifted)
    other.__dict__.update(RENDERER.__dict__)
    teacher = reads(-1.0)
    models = FunctionModels(RENDERER, policy=reads(-2.0), teacher=teacher)
    reader = TeacherReader(models, "teacher")
    assert (await reader.read("policy", [9], [1])).teacher is not None
    models.served["teacher"] = PoolModel(other, 4_096)
    assert (await reader.read("policy", [9], [1])).reason == "other_vocabulary"
    hints = ScriptedSampler(*says("Say seven, please.", "Say eight, please."))
    found, models = finder(hints, selection="overlap", teacher_pool="teacher")
    models.pools["teacher"], models.served["teacher"] = teacher, PoolModel(other, 4_096)
    assert (await found.find(TURN)).dropped == "other_vocabulary"
    assert len(teacher.requests) == 1
