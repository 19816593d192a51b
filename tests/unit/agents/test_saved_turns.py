"""A saved turn comes back to the last bit, and what cannot be read is never guessed at."""

import json

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.trajectories import FinishReason, ForkReason, Message, ToolCall
from rollout_service.engines.contract import Generation, ReturnedExtras, TopLogprob
from rollout_service.engines.serving.saved_turns import (
    GivenMessages,
    SavedTurn,
    UnreadableTurnError,
    decode,
    encode,
)

IDS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(allow_nan=False, allow_infinity=False)
CALLS = st.builds(
    ToolCall,
    id=st.text(max_size=5),
    name=st.none() | st.just("bash"),
    arguments=st.none()
    | st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=2),
    raw=st.text(max_size=9),
)
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=st.text(max_size=20),
    tool_calls=st.lists(CALLS, max_size=2),
    tool_call_id=st.none() | st.just("call-0"),
)
GIVEN = st.builds(
    GivenMessages, st.lists(MESSAGES, max_size=2), st.none() | st.sampled_from([ForkReason.COMPACTION])
)


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
    return SavedTurn(
        draw(st.lists(GIVEN, max_size=2)), draw(st.lists(IDS, max_size=5)), generation, draw(LOGPROBS)
    )


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
