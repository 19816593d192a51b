"""A generation interrupted anywhere, any number of times, has the tokens of one that was left alone."""

from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import GenerateRequest, SamplingOptions, new_request_id
from rollout_service.engines.kinds.token_stream import as_one_chunk
from rollout_service.engines.pool.continuation import Continuation, CutStops
from tests.support.samples import generation


def token_at(position):
    return (position * 7 + 3) % 512


def answer(request, count, finish_reason, version=0):
    """Return an engine's answer with the known token of each position."""
    start = len(request.input_ids)
    return generation(
        [token_at(position) for position in range(start, start + count)],
        logprobs=[-float(position) for position in range(start, start + count)],
        versions=[version] * count,
        finish_reason=finish_reason,
        prompt_tokens=start,
        cached_tokens=min(start, 2),
        backend_id=f"engine-{version}",
        engine_seconds=0.25,
    )


@given(
    budget=st.integers(1, 60),
    prompt=st.lists(st.integers(0, 511), min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=12),
)
def test_any_aborts_give_exactly_the_budget(budget, prompt, cuts):
    continuation = Continuation(GenerateRequest(new_request_id(), prompt, SamplingOptions(max_new_tokens=budget)))
    whole, sizes, ids = None, [], set()
    for version, cut in enumerate([*cuts, budget]):
        request = continuation.next_request()
        ids.add(request.request_id)
        left = request.sampling.max_new_tokens
        assert request.input_ids == [*prompt, *continuation.output_ids]
        assert left == budget - sum(sizes)
        size = min(cut, left)
        is_last = version == len(cuts)
        reason = FinishReason.LENGTH if is_last else FinishReason.ABORT
        sizes.append(size)
        whole = continuation.add(answer(request, size, reason, version))
        if whole is not None:
            break
    assert whole is not None
    assert whole.finish_reason is FinishReason.LENGTH
    assert whole.output_ids == [token_at(len(prompt) + i) for i in range(budget)]
    assert whole.logprobs == [-float(len(prompt) + i) for i in range(budget)]
    assert whole.versions == [version for version, size in enumerate(sizes) for _ in range(size)]
    assert whole.prompt_tokens == len(prompt)
    assert whole.engine_seconds == 0.25 * len(sizes)
    assert len(ids) == len(sizes)
    assert len({len(each) for each in ids}) == 1, "an id must not be a prefix of another"


def make(budget):
    return Continuation(GenerateRequest(new_request_id(), [1, 2, 3], SamplingOptions(max_new_tokens=budget)))


def test_whatever_else_was_asked_for_is_asked_of_each_engine():
    asked = GenerateRequest(
        new_request_id(),
        [1, 2, 3],
        SamplingOptions(max_new_tokens=4),
        known=2,
        chunk_tokens=5,
        cache_salt="tenant",
        traceparent="00-1-2-01",
        decode=decode,
    )
    changing = {"request_id", "input_ids", "sampling", "extras"}
    assert all(getattr(asked, one.name) != one.default for one in fields(asked) if one.name not in changing)
    continuation = Continuation(asked)
    first = continuation.next_request()
    continuation.add(answer(first, 1, FinishReason.ABORT))
    for request in (first, continuation.next_request()):
        changed = {name for name, value in asdict(request).items() if value != asdict(asked)[name]}
        assert changed <= {"request_id", "input_ids", "sampling"}


def test_an_answer_that_has_stopped_is_whole_though_its_end_was_lost():
    stop = token_at(4)
    asked = SamplingOptions(max_new_tokens=9, stop_token_ids=[stop])
    aborted = Continuation(GenerateRequest(new_request_id(), [1, 2, 3], asked))
    broken = Continuation(GenerateRequest(new_request_id(), [1, 2, 3], asked), on_tokens=lambda chunk: None)
    aborted.next_request()
    part = answer(broken.next_request(), 2, FinishReason.ABORT)
    as_one_chunk(part, broken.sink)
    for whole in aborted.add(part), broken.keep_streamed("engine", version=0):
        assert (whole.finish_reason, whole.matched, whole.output_ids) == (
            FinishReason.STOP,
            stop,
            part.output_ids,
        )


def test_cached_tokens_are_those_of_the_first_answer_with_tokens():
    continuation = make(budget=4)
    continuation.add(answer(continuation.next_request(), 0, FinishReason.ABORT))
    whole = continuation.add(answer(continuation.next_request(), 4, FinishReason.LENGTH))
    assert whole is not None
    assert whole.cached_tokens == 2


PIECES = ["a", "b", "ab", "ba", "x"]
"""Tokens that spell one or two characters, so that stop strings end within a token, too."""


def decode(ids):
    return "".join(PIECES[token] for token in ids)


class Engine:
    """Samples given tokens, and looks for stop strings only in what it samples itself, as engines do."""

    def __init__(self, ids):
        self.ids = ids

    def answer(self, request, prompt, count):
        """Return an answer that is aborted after so many tokens, unless it ends before."""
        start = len(request.input_ids) - len(prompt)
        left = self.ids[start : start + request.sampling.max_new_tokens]
        for end in range(1, min(count, len(left)) + 1):
            stop = next((stop for stop in request.sampling.stop if stop in decode(left[:end])), None)
            if stop is not None:
                return generation(left[:end], matched=stop)
        reason = FinishReason.LENGTH if count >= len(left) else FinishReason.ABORT
        return generation(left[:count], finish_reason=reason)


@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 6), max_size=12),
    is_streamed=st.booleans(),
)
def test_a_stop_string_that_an_interruption_cuts_ends_the_answer(ids, stops, cuts, is_streamed):
    engine, prompt, budget = Engine(ids), [7], len(ids)
    sampling = SamplingOptions(max_new_tokens=budget, stop=stops)
    request = GenerateRequest(new_request_id(), prompt, sampling, decode=decode)
    alone = engine.answer(request, prompt, budget)
    streamed = []
    continuation = Continuation(request, (lambda chunk: streamed.extend(chunk.ids)) if is_streamed else None)
    whole = None
    for cut in [*cuts, *[budget] * 99]:
        attempt = continuation.next_request()
        part = engine.answer(attempt, prompt, cut)
        if (sink := continuation.sink) is not None:
            as_one_chunk(part, sink)
        if (whole := continuation.add(part)) is not None:
            break
    assert whole is not None
    assert (whole.output_ids, whole.finish_reason) == (alone.output_ids, alone.finish_reason)
    assert (whole.matched is None) == (alone.matched is None)
    assert whole.matched is None or whole.matched in decode(whole.output_ids)
    assert streamed == (whole.output_ids if is_streamed else [])


@pytest.mark.parametrize("completed", [False, True])
def test_the_end_of_a_cut_stop_string_is_found_by_decoding_few_times(completed):
    decoded = []
    stops = CutStops(["x" * 256], lambda ids: decoded.append(None) or decode(ids))
    new = [4] * 255 + [0] * 500 + ([4] * 300 if completed else [])
    assert stops.end_of([0] * 900, new) == ((255 + 500 + 256, "x" * 256) if completed else None)
    assert len(decoded) < 20
