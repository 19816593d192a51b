"""Runs are exported whole or not at all."""

import gzip
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.exports import ExportedRun, ExportedSample, ExportEnd
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Usage
from api_schemas.runs import GroupSample, InlineTasks, Run, RunCounts, RunRequest, RunState
from api_schemas.tasks import Task
from api_schemas.trajectories import Message, Trajectory
from rollout_client.run_export import BadExportError, RunExport
from tests.support.samples import segment, trajectory

NOW = datetime(2025, 1, 1, 1, 2, 3, 456_789, tzinfo=UTC)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
MAYBE = st.none() | FINITE
RUN = Run(
    run_id="a",
    state=RunState.FINISHED,
    request=RunRequest(run_id="a", source=InlineTasks(), batch_size=1),
    version=3,
    tasks=2,
    cursor=2,
    acceptance_rate=0.5,
    counts=RunCounts(dropped={"stale": 1}),
    created_at=NOW,
)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    size = draw(st.integers(0, 5))
    ids = draw(st.lists(st.integers(0, 2**31), min_size=size, max_size=size))
    logprobs = draw(st.lists(FINITE, min_size=size, max_size=size))
    text = draw(st.text(max_size=9))
    return trajectory(segment(ids, logprobs=logprobs), messages=[Message(role="assistant", content=text)])


@st.composite
def samples(draw: st.DrawFn) -> ExportedSample:
    number = draw(st.integers(0, 10**6))
    instance = draw(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | FINITE | st.text(max_size=9)))
    task, reward = Task(environment="calc", instance=instance), draw(MAYBE)
    rollout = Rollout(
        rollout_id=f"a.{number}.0",
        state=RolloutState.COMPLETED,
        task=task,
        pool="policy",
        reward=reward,
        usage=Usage(turns=1),
        created_at=NOW,
        trajectory=draw(st.none() | trajectories()),
    )
    state = draw(st.sampled_from(["ready", "batched", "acknowledged", "dropped"]))
    return ExportedSample(
        group_id=f"a.{number}",
        number=number,
        epoch=draw(st.integers(0, 3)),
        group_state=state,
        dropped_because="stale" if state == "dropped" else None,
        batch_id=None,
        reward_mean=draw(MAYBE),
        reward_std=draw(MAYBE),
        request=RolloutRequest(rollout_id=f"a.{number}.0", task=task),
        sample=GroupSample(sample=0, rollout=rollout, usable=reward is not None, reward=reward, advantage=draw(MAYBE)),
        oldest_version=draw(st.none() | st.integers(0, 9)),
        newest_version=None,
    )


def lines(*models: ExportedRun | ExportedSample | ExportEnd) -> bytes:
    return b"".join(model.model_dump_json().encode() + b"\n" for model in models)


@given(st.lists(samples(), max_size=4), st.booleans())
def test_the_data_read_is_the_data_written(written, packed):
    data = lines(ExportedRun(run=RUN), *written, ExportEnd(samples=len(written)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        path.write_bytes(gzip.compress(data) if packed else data)
        export = RunExport(path)
        assert export.run == RUN
        assert list(export.samples()) == written
        assert list(export.samples()) == written, "it can be read again"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kept", [0, 1, 10, -1, -3])
def test_a_truncated_file_is_not_taken_for_a_shorter_run(tmp_path, kept, packed):
    data = lines(ExportedRun(run=RUN), ExportEnd(samples=0))
    path = tmp_path / "run"
    path.write_bytes((gzip.compress(data) if packed else data)[: kept if kept != -1 else -2])
    with pytest.raises(BadExportError, match="run"):
        list(RunExport(path).samples())


def test_a_count_that_is_wrong_is_found(tmp_path):
    path = tmp_path / "run"
    path.write_bytes(lines(ExportedRun(run=RUN), ExportEnd(samples=1)))
    with pytest.raises(BadExportError, match="truncated after 0 rollouts"):
        list(RunExport(path).samples())
    path.write_bytes(lines(ExportEnd(samples=0)))
    with pytest.raises(BadExportError, match="does not begin with a run"):
        RunExport(path)
