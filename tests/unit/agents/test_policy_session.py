"""A session of a policy samples turns, saves each, and goes on from the saved ones after a restart."""

import json
import threading
from dataclasses import dataclass, field

import anyio
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.rollouts import Sampling
from api_schemas.trajectories import FinishReason, ForkReason, Message, ToolCall
from rollout_service.engines import contract as inference
from rollout_service.engines.contract import Generation, ReturnedExtras, TopLogprob
from rollout_service.engines.errors import BackendUnreachable, PromptTooLong
from rollout_service.engines.serving.saved_turns import (
    GivenMessages,
    SavedTurn,
    UnreadableTurnError,
    decode,
    encode,
)
from rollout_service.engines.serving.session import INLINE_CHARS
from rollout_service.episodes import ContextFullError
from rollout_service.tokens import check_invariants
from tests.support import samples
from tests.support.tokens import characters
from tests.support.tokens.characters import STOP, CharRenderer

QUESTION = [Message(role="user", content="abc")]


@dataclass
class Watched(CharRenderer):
    """Records its threads, and can refuse to extend a prompt."""

    threads: list[int] = field(default_factory=list)
    refuse: bool = False

    def render(self, messages, tools=()):
        self.threads.append(threading.get_ident())
        return super().render(messages, tools)

    def count_if_over(self, texts, most):
        tokens = sum(map(len, texts))
        return tokens if tokens > 2 * most else None

    def bridge(self, prompt, output, messages, tools=(), history=()):
        return None if self.refuse else super().bridge(prompt, output, messages)


@dataclass
class ScriptedPool:
    """Answers each request with the next text or error, or waits until it is cancelled (None)."""

    answers: list
    requests: list = field(default_factory=list)

    async def generate(self, request, *, affinity=None):
        self.requests.append((request, affinity))
        answer = self.answers.pop(0)
        if answer is None:
            await anyio.sleep_forever()
        if isinstance(answer, Exception):
            raise answer
        ids = [*map(ord, answer), STOP][: request.sampling.max_new_tokens]
        reason = FinishReason.STOP if ids[-1] == STOP else FinishReason.LENGTH
        return samples.generation(ids, finish_reason=reason, prompt_tokens=len(request.input_ids), cached_tokens=2)


def session(answers, context_length=1_000, renderer=None, **sampling):
    pool = ScriptedPool(answers)
    given = {"affinity": "rollout-7", "sampling": Sampling(**sampling), "context_length": context_length}
    return characters.session(pool, renderer or Watched(), **given), pool


async def test_a_replaced_history_begins_a_segment_that_names_its_parent():
    policy, pool = session(["hello", "short", "world"])
    await policy.respond(QUESTION, max_tokens=50)
    summary = await policy.respond([Message(role="user", content="sum up")], max_tokens=50)
    kept = [policy.messages[0], Message(role="user", content=summary.message.content)]
    policy.replace(kept, ForkReason.COMPACTION)
    await policy.respond([], max_tokens=50)
    trajectory = policy.trajectory()
    check_invariants(trajectory)
    first, second = trajectory.segments
    assert (second.fork_reason, second.parent, second.shared_prefix) == (ForkReason.COMPACTION, 0, 4)
    assert list(pool.requests[-1][0].input_ids) == [97, 98, 99, 0, *map(ord, "short"), 0]
    assert [sum(first.loss_mask), sum(second.loss_mask)] == [12, 6]


async def test_a_turn_goes_to_the_pool_and_is_recorded_to_the_id():
    policy, pool = session(["hello", "world"], temperature=0.5, top_k=0, stop=["\n"], seed=9)
    turn = await policy.respond(QUESTION, max_tokens=50)
    assert (turn.message.content, turn.truncated, turn.malformed) == ("hello", False, 0)
    request, affinity = pool.requests[0]
    assert affinity == "rollout-7"
    assert list(request.input_ids) == [97, 98, 99, 0]
    assert request.sampling == inference.SamplingOptions(
        max_new_tokens=50, temperature=0.5, top_k=-1, stop=("\n",), stop_token_ids=(STOP,), seed=9
    )
    await policy.respond([Message(role="tool", content="ok")], max_tokens=50)
    trajectory = policy.trajectory()
    check_invariants(trajectory)
    [segment] = trajectory.segments
    assert "".join(chr(i) for i in segment.token_ids if i > 1) == "abchellookworld"
    assert sum(segment.loss_mask) == policy.usage.sampled_tokens == 12
    usage = policy.usage
    assert (usage.turns, usage.prompt_tokens, usage.cached_tokens) == (2, 4 + 13, 4)


async def test_it_never_asks_for_more_than_fits():
    policy, pool = session(["x" * 100], context_length=30)
    turn = await policy.respond(QUESTION, max_tokens=500)
    assert pool.requests[0][0].sampling.max_new_tokens == 30 - 1 - 4
    assert (turn.truncated, turn.context_full) == (True, True)
    with pytest.raises(ContextFullError):
        await policy.respond([Message(role="tool", content="more")], max_tokens=500)
    assert policy.usage.turns == 1
    assert policy.trajectory().finish_reasons == [FinishReason.LENGTH]


async def test_a_turn_that_its_own_limit_cuts_off_leaves_the_context_alone():
    policy, _ = session(["x" * 100], context_length=500)
    turn = await policy.respond(QUESTION, max_tokens=20)
    assert (turn.truncated, turn.context_full) == (True, False)


async def test_a_prompt_that_is_much_longer_than_the_context_is_not_rendered():
    renderer = Watched()
    policy, pool = session(["hello"], context_length=INLINE_CHARS, renderer=renderer)
    await policy.respond(QUESTION, max_tokens=50)
    with pytest.raises(ContextFullError, match=f"{4 * INLINE_CHARS + 4 + 6} tokens"):
        await policy.respond([Message(role="tool", content="x" * 4 * INLINE_CHARS)], max_tokens=50)
    assert len(renderer.threads) == len(pool.requests) == 1


async def test_an_engine_with_a_shorter_context_than_it_stated_is_an_error():
    policy, _ = session([PromptTooLong("too long")])
    with pytest.raises(ContextFullError):
        await policy.respond(QUESTION, max_tokens=20)


@pytest.mark.parametrize("broken", [None, BackendUnreachable("gone")])
async def test_sampled_tokens_stay_exact_after_a_cancellation_or_an_error(broken):
    policy, _ = session(["hello", broken])
    await policy.respond(QUESTION, max_tokens=50)
    before = policy.trajectory().segments
    try:
        with anyio.move_on_after(0.05):
            await policy.respond([Message(role="tool", content="ok")], max_tokens=50)
    except BackendUnreachable:
        pass
    check_invariants(policy.trajectory())
    assert policy.trajectory().segments == before
    assert policy.usage.turns == 1
    assert policy.engine_seconds >= (0.04 if broken is None else 0.0)


async def test_only_long_prompts_are_rendered_in_a_thread():
    renderer = Watched()
    policy, _ = session(["a", "b", "c", "d"], context_length=100_000, renderer=renderer)
    here = threading.get_ident()
    await policy.respond([Message(role="user", content="x" * INLINE_CHARS)], max_tokens=5)
    await policy.respond([Message(role="tool", content="x" * (INLINE_CHARS + 1))], max_tokens=5)
    await policy.respond([Message(role="tool", content="short")], max_tokens=5)
    assert [ident == here for ident in renderer.threads] == [True, False, True]
    renderer.refuse = True
    await policy.respond([Message(role="tool", content="short")], max_tokens=5)
    policy_after = [ident == here for ident in renderer.threads[3:]]
    assert policy_after == [True]  # the first refusal could not be foreseen


IDS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(allow_nan=False, allow_infinity=False)
CALLS = st.builds(
    ToolCall,
    id=st.text(max_size=5),
    name=st.none() | st.just("bash"),
    arguments=st.none() | st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=2),
    raw=st.text(max_size=9),
)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=st.text(max_size=20),
    tool_calls=st.lists(CALLS, max_size=2),
    tool_call_id=st.none() | st.just("call-0"),
)
GIVEN = st.builds(GivenMessages, st.lists(MESSAGES, max_size=2), st.none() | st.sampled_from([ForkReason.COMPACTION]))


@st.composite
def turns(draw: st.DrawFn) -> SavedTurn:
    sampled = draw(st.integers(0, 5))
    exactly = {"min_size": sampled, "max_size": sampled}
    top = st.lists(st.builds(TopLogprob, IDS, LOGPROBS | st.just(float("-inf"))), max_size=2)
    extras = ReturnedExtras(
        top_logprobs=draw(st.none() | st.lists(top, **exactly)),
        prompt_logprobs=draw(st.none() | st.lists(st.none() | LOGPROBS, max_size=3)),
        routed_experts=draw(st.none() | st.just(np.arange(24, dtype=np.int32).reshape(3, 2, 4))),
    )
    generation = Generation(
        output_ids=draw(st.lists(IDS, **exactly)),
        logprobs=draw(st.lists(LOGPROBS, **exactly)),
        versions=draw(st.lists(st.integers(0, 2**63 - 1), **exactly)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        prompt_tokens=draw(st.integers(0, 10**6)),
        cached_tokens=draw(st.integers(0, 10**6)),
        kept_kv_versions=draw(st.frozensets(st.integers(0, 9), max_size=2)),
        backend_id="b",
        engine_seconds=draw(LOGPROBS),
        extras=extras,
    )
    return SavedTurn(draw(st.lists(GIVEN, max_size=2)), draw(st.lists(IDS, max_size=5)), generation, draw(LOGPROBS))


@given(turns())
def test_a_turn_comes_back_as_it_was(turn):
    back = decode(encode(turn))
    assert (back.given, back.context, back.worked_seconds) == (turn.given, turn.context, turn.worked_seconds)
    before, after = turn.generation, back.generation
    assert np.array(after.logprobs).tobytes() == np.array(before.logprobs).tobytes(), "to the last bit"
    assert after.extras.top_logprobs == before.extras.top_logprobs
    assert after.extras.prompt_logprobs == before.extras.prompt_logprobs
    assert np.array_equal(after.extras.routed_experts, before.extras.routed_experts)
    names = set(Generation.__dataclass_fields__) - {"extras"}
    assert all(getattr(after, name) == getattr(before, name) for name in names)


@given(turns(), st.data())
def test_damaged_bytes_are_refused(turn, data):
    good = encode(turn)
    with pytest.raises(UnreadableTurnError):
        decode(good[: data.draw(st.integers(0, len(good) - 1))])
    with pytest.raises(UnreadableTurnError):
        decode(data.draw(st.binary(max_size=40)))


def test_a_form_of_another_release_is_refused():
    header = json.dumps({"form": 2}).encode()
    later = zstandard.ZstdCompressor().compress(len(header).to_bytes(4, "little") + header)
    with pytest.raises(UnreadableTurnError, match="form 2"):
        decode(later)
