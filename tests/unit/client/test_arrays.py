"""Stored trajectories, and batches as arrays, are bit for bit the originals."""

from collections.abc import Sequence
from datetime import UTC, datetime

import anyio
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from api_schemas.runs import Batch, Group, GroupSample
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason, Message, Segment, Trajectory
from rollout_client.arrays import BatchArrays
from rollout_service.base.errors import StoreError
from rollout_service.runs.delivery import BatchFile
from rollout_service.store.codec import trajectories as trajectory_codec
from rollout_service.store.codec.groups import group_json
from rollout_service.store.codec.trajectories import Columns
from rollout_service.store.runs_contract import ClosedSample, GroupHead
from tests.support import samples

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
FLOATS32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
NOW = datetime(2025, 1, 1, tzinfo=UTC)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    size = draw(st.integers(0, 12))

    def column(values: st.SearchStrategy) -> list:
        return draw(st.lists(values, min_size=size, max_size=size))

    return Segment(
        token_ids=column(INT32),
        loss_mask=column(st.integers(0, 1)),
        logprobs=column(draw(st.sampled_from([FLOATS, FLOATS32]))),
        versions=column(INT32),
        turn_ids=column(st.integers(-1, 9)),
        fork_reason=draw(st.sampled_from(list(ForkReason))),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    return Trajectory(
        segments=draw(st.lists(segments(), max_size=3)),
        messages=[Message(role="user", content=draw(st.text(max_size=20)))],
        finish_reasons=[FinishReason.STOP],
        fork_counts={ForkReason.FIRST: 1},
    )


@settings(deadline=None)
@given(trajectories())
def test_a_trajectory_is_read_as_it_was_written(trajectory):
    assert trajectory_codec.decode(trajectory_codec.encode(trajectory)) == trajectory


@pytest.mark.parametrize("token", [2**31, -(2**40)])
def test_a_trajectory_that_does_not_fit_the_columns_is_kept_too(token):
    trajectory = sample_trajectory([token, 1])
    assert trajectory_codec.decode(trajectory_codec.encode(trajectory)) == trajectory


def sample_trajectory(ids: list[int]) -> Trajectory:
    return samples.trajectory(samples.segment(ids, logprobs=[-0.25] * len(ids)))


def sample(number: int, trajectory: Trajectory | None, reward: float | None) -> GroupSample:
    rollout = samples.rollout(f"a.0.{number}", trajectory=trajectory)
    return GroupSample(sample=number, rollout=rollout, usable=reward is not None, reward=reward)


def batch_of(samples: list[list[GroupSample]]) -> Batch:
    groups = [
        Group(
            group_id=f"a.{number}",
            number=number,
            epoch=0,
            task=Task(environment="calc"),
            samples=group,
            usable=sum(one.usable for one in group),
            reward_mean=None,
            reward_std=None,
            oldest_version=None,
            newest_version=None,
        )
        for number, group in enumerate(samples)
    ]
    return Batch(
        batch_id="a.b0",
        run_id="a",
        number=0,
        groups=groups,
        delivery=1,
        lease_until=NOW,
        version=0,
        oldest_version=None,
        newest_version=None,
        dropped={},
    )


def head_of(group: Group, columns: Sequence[Sequence[Columns]]) -> GroupHead:
    samples = [
        ClosedSample(s.sample, s.rollout.rollout_id, s.usable, s.masked_because, s.reward, s.advantage)
        for s in group.samples
    ]
    tokens = [[len(segment) for segment in segments] for segments in columns]
    return GroupHead(group.number, group_json(group), samples, tokens, None, None)


def file_of(batch: Batch, groups: Sequence[Sequence[Sequence[Columns]]], *, compressed: bool = False) -> BatchFile:
    """Return the file of a batch without tokens, reading them from the columns of each group's samples."""

    async def read(number: int) -> list[Columns]:
        return [segment for sample in groups[number] for segment in sample]

    heads = [head_of(group, columns) for group, columns in zip(batch.groups, groups, strict=True)]
    return BatchFile(batch.model_copy(update={"groups": []}), heads, read, compressed=compressed)


def written(file: BatchFile) -> bytes:
    pieces: list[bytes] = []

    async def send(piece: memoryview) -> None:
        pieces.append(bytes(piece))

    anyio.run(file.write, send)
    return b"".join(pieces)


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.lists(st.none() | trajectories(), min_size=1, max_size=3), max_size=3))
def test_a_batch_as_arrays(shape):
    split = [
        [(None, []) if one is None else trajectory_codec.split(trajectory_codec.encode(one)) for one in g]
        for g in shape
    ]
    batch = batch_of([[sample(n, bare, 1.0) for n, (bare, _) in enumerate(group)] for group in split])
    columns = [[columns for _, columns in group] for group in split]
    file = file_of(batch, columns)
    data = written(file)
    assert len(data) == file.length
    compressed = written(file_of(batch, columns, compressed=True))
    with zstandard.ZstdDecompressor().stream_reader(compressed, read_across_frames=True) as reader:
        assert reader.read() == data
    read = BatchArrays.from_bytes(data)
    assert read.batch == batch
    by_library = load(data)
    assert set(by_library) == set(read.tensors)
    assert all(np.array_equal(by_library[name], read.tensors[name], equal_nan=True) for name in by_library)
    whole = [segment for group in shape for one in group if one for segment in one.segments]
    for number, segment in enumerate(whole):
        columns = read.segment(number)
        assert columns["token_ids"].tolist() == segment.token_ids
        assert columns["loss_mask"].tolist() == segment.loss_mask
        assert columns["versions"].tolist() == segment.versions
        with np.errstate(over="ignore"):
            assert np.array_equal(columns["logprobs"], np.array(segment.logprobs).astype("<f4"))


def test_a_failure_is_not_a_zero_and_a_file_is_mapped(tmp_path):
    _, columns = trajectory_codec.split(trajectory_codec.encode(sample_trajectory([7, 8])))
    batch = batch_of([[sample(0, None, None), sample(1, None, 0.5)]])
    path = tmp_path / "batch.safetensors"
    path.write_bytes(written(file_of(batch, [[[], columns]])))
    read = BatchArrays.from_file(path)
    assert np.isnan(read.tensors["rewards"][0])
    assert read.tensors["rewards"][1] == 0.5
    assert np.isnan(read.tensors["advantages"]).all()
    assert read.tensors["usable"].tolist() == [0, 1]
    assert read.tensors["sample_offsets"].tolist() == [0, 0, 1]
    assert not read.tensors["token_ids"].flags.owndata
    assert not read.tensors["token_ids"].flags.writeable


def test_a_column_of_another_size_is_refused():
    _, [columns] = trajectory_codec.split(trajectory_codec.encode(sample_trajectory([7, 8])))
    for tokens in (1, 3):
        with pytest.raises(ValueError, match=r"the expected \d+ bytes"):
            columns.fill("token_ids", np.empty(tokens, "<i4"))
        with pytest.raises(ValueError, match=r"the expected \d+ bytes"):
            Columns(tokens, columns.columns).frame("token_ids", np.dtype("<i4"))


def test_a_group_that_changed_is_not_sent_as_what_it_was():
    _, columns = trajectory_codec.split(trajectory_codec.encode(sample_trajectory([7, 8])))
    batch = batch_of([[sample(0, None, 0.5)]])

    async def pruned(_: int) -> list[Columns]:
        return []

    file = BatchFile(batch.model_copy(update={"groups": []}), [head_of(batch.groups[0], [columns])], pruned)
    with pytest.raises(StoreError, match="changed while it was sent"):
        written(file)


def test_a_column_is_released_once_it_was_sent():
    packed = trajectory_codec.encode(sample_trajectory(list(range(10_000))))
    (columns,) = trajectory_codec.columns_of(packed)
    rest = columns.without("token_ids")
    assert len(rest) == 10_000
    held = {name: memoryview(column.data.obj).nbytes for name, column in rest.columns.items()}
    assert set(held) == set(columns.columns) - {"token_ids"}
    assert sum(held.values()) < len(packed) / 2
    assert rest.array("turn_ids").tolist() == columns.array("turn_ids").tolist()


@pytest.mark.torch
def test_torch_gets_the_same_memory():
    import torch

    _, columns = trajectory_codec.split(trajectory_codec.encode(sample_trajectory([7, 8])))
    batch = batch_of([[sample(0, None, None), sample(1, None, 0.5)]])
    read = BatchArrays.from_bytes(bytearray(written(file_of(batch, [[[], columns]]))))
    tensors = read.torch()
    assert set(tensors) == set(read.tensors)
    assert tensors["token_ids"].tolist() == [7, 8]
    assert tensors["logprobs"].dtype is torch.float32
    assert tensors["segment_offsets"].dtype is torch.int64
    assert tensors["rewards"].isnan().tolist() == [True, False]
    assert all(tensors[name].data_ptr() == array.ctypes.data for name, array in read.tensors.items())


@pytest.mark.parametrize("data", [b"", b"\xff" * 8 + b"{}", (2).to_bytes(8, "little") + b"{}"])
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match="safetensors file"):
        BatchArrays.from_bytes(data)
