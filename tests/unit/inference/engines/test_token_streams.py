"""A streamed answer is believed chunk by chunk, delivered once, and whole or broken off at its end."""

import copy
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.trajectories import FinishReason
from rollout_service.engines.contract import (
    GenerateRequest,
    ModelInfo,
    RequestedExtras,
    SamplingOptions,
    new_request_id,
)
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    InferenceError,
)
from rollout_service.engines.kinds.http_client import EventSplitter
from rollout_service.engines.kinds.sglang.backend import SGLangStream, stream_interval
from rollout_service.engines.kinds.sglang.wire import generate_body
from rollout_service.engines.kinds.vllm.backend import VllmStream
from rollout_service.engines.kinds.vllm.wire import engine_request_id

REQUEST = GenerateRequest(
    new_request_id(), [1, 2, 3], SamplingOptions(max_new_tokens=8), RequestedExtras(top_logprobs=1)
)
INFO = ModelInfo(model_path="m", tokenizer_path="m", weight_version=0, vocab_size=50, context_length=100)
IDS = [5, 6, 7, 8, 9, 10]


class Sink:
    def __init__(self):
        self.chunks = []

    def __call__(self, chunk):
        self.chunks.append(chunk)

    @property
    def ids(self):
        return [id_ for chunk in self.chunks for id_ in chunk.ids]


def sglang_chunk(start, end, *, is_last=False, versions=None, ids=IDS):
    spans = versions or [{"version": "4", "start": 0, "end": end}]
    spans = [span | {"end": min(span["end"], end)} for span in spans if span["start"] < end]
    return {
        "output_ids": ids[start:end],
        "meta_info": {
            "finish_reason": {"type": "length", "length": end} if is_last else None,
            "prompt_tokens": 3,
            "completion_tokens": end,
            "cached_tokens": 2,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
            "output_token_logprobs": [[-0.1, id_, None] for id_ in ids[start:end]],
            "output_top_logprobs": [[[-0.1, id_, None]] for id_ in ids[start:end]],
        },
    }


def vllm_chunks(*ends):
    chunks, start = [], 0
    for end in ends:
        is_last = end == len(IDS)
        content = [
            {"token_id": id_, "logprob": -0.1, "top_logprobs": [{"token_id": id_, "logprob": -0.1}]}
            for id_ in IDS[start:end]
        ]
        choice = {
            "token_ids": IDS[start:end],
            "logprobs": {"content": content},
            "finish_reason": "length" if is_last else None,
            "weight_versions": [{"version": "4", "start": 0, "end": end}] if is_last else None,
        }
        chunks.append({"request_id": engine_request_id(REQUEST.request_id), "choices": [choice]})
        start = end
    counts = {"prompt_tokens": 3, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 2}}
    return [*chunks, {"request_id": chunks[0]["request_id"], "choices": [], "usage": counts}]


def read(kind, chunks, sink, request=REQUEST):
    stream = kind(request, INFO, "b", sink)
    for chunk in chunks:
        stream.take(chunk)
    generation = stream.whole(0.5)
    stream.end(generation)
    return generation


@given(
    ends=st.sets(st.integers(1, 5)),
    modes=st.lists(st.booleans(), min_size=6, max_size=6),
    split=st.integers(1, 6),
)
def test_sglang_s_chunks_are_joined_whether_they_have_all_tokens_or_the_new_ones(ends, modes, split):
    versions = [{"version": "4", "start": 0, "end": split}, {"version": "5", "start": split, "end": 6}]
    sink, starts = Sink(), [0, *sorted(ends)]
    chunks = [
        sglang_chunk(start if is_incremental else 0, end, is_last=end == 6, versions=versions)
        for start, end, is_incremental in zip(starts, [*starts[1:], 6], modes, strict=False)
    ]
    generation = read(SGLangStream, chunks, sink)
    assert generation.output_ids == sink.ids == IDS
    assert generation.versions == [4] * split + [5] * (6 - split)
    assert [each for chunk in sink.chunks for each in chunk.versions] == generation.versions
    assert [row for chunk in sink.chunks for row in chunk.top_logprobs] == generation.extras.top_logprobs
    assert len(generation.logprobs) == 6


@given(ends=st.sets(st.integers(1, 5)))
def test_vllm_s_chunks_are_joined(ends):
    sink = Sink()
    generation = read(VllmStream, vllm_chunks(*sorted(ends), 6), sink)
    assert generation.output_ids == sink.ids == IDS
    assert generation.versions == [4] * 6
    assert [row for chunk in sink.chunks for row in chunk.top_logprobs] == generation.extras.top_logprobs
    assert [chunk.versions for chunk in sink.chunks[:-1]] == [None] * (len(sink.chunks) - 1)


JUNK = st.none() | st.booleans() | st.integers(-2, 60) | st.text(max_size=3) | st.just([]) | st.just({})


def places(value, path=()):
    """Yield the path of every value in a JSON document."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from places(each, (*path, key))


@pytest.mark.parametrize(
    ("kind", "good"),
    [
        (SGLangStream, [sglang_chunk(0, 2), sglang_chunk(2, 4), sglang_chunk(4, 6, is_last=True)]),
        (SGLangStream, [sglang_chunk(0, 2), sglang_chunk(0, 4), sglang_chunk(0, 6, is_last=True)]),
        (VllmStream, vllm_chunks(2, 4, 6)),
    ],
    ids=["incremental", "cumulative", "vllm"],
)
@given(data=st.data())
def test_garbage_in_the_middle_raises_nothing_but_inference_errors(kind, good, data):
    chunks = copy.deepcopy(good)
    number = data.draw(st.integers(0, len(chunks) - 1))
    path = data.draw(st.sampled_from([path for path in places(chunks[number]) if path]))
    parent = chunks[number]
    for part in path[:-1]:
        parent = parent[part]
    parent[path[-1]] = data.draw(JUNK)
    sink = Sink()
    try:
        generation = read(kind, chunks, sink)
    except InferenceError:
        if path[-1] != "finish_reason":  # without it, the last chunk cannot be told from the others
            assert len(sink.ids) <= 4, "what ends an answer that cannot be trusted is not delivered"
    else:
        assert generation.output_ids == sink.ids


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([sglang_chunk(0, 2), sglang_chunk(0, 1)], "completion_tokens is 1 after 2"),
        ([sglang_chunk(0, 2), sglang_chunk(1, 4)], "output_ids has 3 entries for 2 new of 4"),
        ([sglang_chunk(0, 6, is_last=True), sglang_chunk(0, 6, is_last=True)], "after its last chunk"),
        (
            [sglang_chunk(0, 2), sglang_chunk(0, 6, is_last=True, ids=[5, 9, *IDS[2:]])],
            "does not begin with the tokens that were streamed",
        ),
        ([sglang_chunk(0, 2), sglang_chunk(2, 9, ids=[5] * 9)], "at most 6 were asked for"),
    ],
)
def test_chunks_that_contradict_each_other_are_refused(chunks, message):
    with pytest.raises(BackendProtocolError, match=message):
        read(SGLangStream, chunks, Sink())


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [
        (SGLangStream, [sglang_chunk(0, 2), sglang_chunk(2, 4)]),
        (VllmStream, vllm_chunks(2, 4, 6)[:-2]),
        (VllmStream, vllm_chunks(2, 4, 6)[:-1]),
    ],
    ids=["sglang", "vllm without its last chunk", "vllm without its counts"],
)
def test_a_stream_without_its_end_delivers_what_came_before(kind, chunks):
    sink = Sink()
    with pytest.raises(BackendUnreachable, match="without saying why sampling ended"):
        read(kind, chunks, sink)
    assert sink.ids == IDS[:4]


@pytest.mark.parametrize(("status", "error"), [(400, BackendRejected), (503, BackendUnreachable)])
def test_an_abort_that_is_a_failure_has_the_error_of_its_status(status, error):
    last = sglang_chunk(2, 2)
    last["meta_info"]["finish_reason"] = {"type": "abort", "status_code": status, "message": "out of memory"}
    with pytest.raises(error, match=f"{status}: out of memory"):
        read(SGLangStream, [sglang_chunk(0, 2), last], Sink())


def test_an_abort_in_the_queue_that_says_little_keeps_what_was_streamed():
    reason = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "9"}
    sink = Sink()
    chunks = [sglang_chunk(0, 2), sglang_chunk(2, 4), {"output_ids": [], "meta_info": reason}]
    generation = read(SGLangStream, chunks, sink)
    assert generation.finish_reason is FinishReason.ABORT
    assert generation.output_ids == sink.ids == IDS[:4]
    assert generation.versions == [4] * 4, "not those that the engine has now"


def test_servers_that_repeat_tokens_are_asked_for_fewer_chunks():
    def interval(budget, *, is_incremental, **options):
        request = GenerateRequest(new_request_id(), [1], SamplingOptions(max_new_tokens=budget), **options)
        return stream_interval(request, is_incremental=is_incremental)

    assert [interval(budget, is_incremental=False) for budget in (1, 2_048, 2_049, 16_384)] == [8, 8, 9, 64]
    assert interval(16_384, is_incremental=True) == 1
    assert interval(16, is_incremental=True, chunk_tokens=32) == 32
    assert interval(16, is_incremental=False, chunk_tokens=32) == 32
    assert generate_body(REQUEST)["stream"] is False
    assert generate_body(REQUEST, 8)["sampling_params"]["stream_interval"] == 8


LINE = st.binary(max_size=20).map(lambda raw: raw.replace(b"\n", b"-").replace(b"\r", b"-"))


def split(*parts: bytes) -> list[bytes]:
    events: list[bytes] = []
    splitter = EventSplitter(events.append)
    for part in parts:
        before = len(events)
        assert splitter.feed(part) == (len(events) > before)
    return events


@given(
    events=st.lists(st.lists(LINE, min_size=1, max_size=3), max_size=6),
    end=st.sampled_from([b"\n", b"\r\n"]),
    cuts=st.lists(st.integers(0, 400)),
)
def test_where_the_bytes_are_cut_changes_nothing(events: list[list[bytes]], end: bytes, cuts: list[int]) -> None:
    raw = b"".join(b"".join(b"data: " + line + end for line in lines) + b": comment" + end + end for lines in events)
    places = sorted({0, len(raw), *(min(cut, len(raw)) for cut in cuts)})
    parts = [raw[start:stop] for start, stop in pairwise(places)]
    assert split(*parts) == [b"\n".join(lines) for lines in events]


@pytest.mark.parametrize(
    ("raw", "events"),
    [
        (b"data:{}\n\n", [b"{}"]),
        (b"event: x\nid: 1\ndata: a\n\n", [b"a"]),
        (b"\n\n\n: ping\n\n", []),
        (b"data: never finished\n", []),
        (b"database: x\n\n", []),
    ],
)
def test_only_the_data_of_finished_events_counts(raw: bytes, events: list[bytes]) -> None:
    assert split(raw) == events


def test_unfinished_bytes_are_counted() -> None:
    splitter = EventSplitter(lambda _: None)
    splitter.feed(b"data: abc\ndata: de")
    assert splitter.unfinished_bytes == len(b"abc") + len(b"data: de")
    splitter.feed(b"\n\n")
    assert splitter.unfinished_bytes == 0
