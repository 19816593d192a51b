"""Runs are exported, and files downloaded, whole or not at all."""

import gzip
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.abc import SocketStream
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.exports import ExportedRun, ExportedSample, ExportEnd
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, Usage
from api_schemas.runs import GroupSample, InlineTasks, Run, RunCounts, RunRequest, RunState
from api_schemas.tasks import Task
from api_schemas.trajectories import Message, Trajectory
from rollout_client._download import LargeBody
from rollout_client.run_export import BadExportError, RunExport
from tests.support.samples import segment, trajectory
from tests.support.waiting import until

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
    instance = draw(
        st.dictionaries(st.text(max_size=5), st.none() | st.integers() | FINITE | st.text(max_size=9))
    )
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
        sample=GroupSample(
            sample=0, rollout=rollout, usable=reward is not None, reward=reward, advantage=draw(MAYBE)
        ),
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


@asynccontextmanager
async def answering(answer: bytes, *, hang: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Yield the URL of a server that sends `answer` on each connection, and a list of what it received.

    The server then closes the connection; with `hang`, it waits for the client to do so.
    """
    asked: list[bytes] = []

    async def handle(stream: SocketStream) -> None:
        async with stream:
            asked.append(await stream.receive())
            await stream.send(answer)
            if hang:
                asked.append(await read_end(stream))

    async def read_end(stream: SocketStream) -> bytes:
        try:
            return await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return b"gone"

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, handle)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}", asked
        tasks.cancel_scope.cancel()


async def fetch(url: str, *, seconds: float = 10.0) -> tuple[httpx.Response, bytearray]:
    body = LargeBody()
    headers = {"authorization": "Bearer k", "accept-encoding": "gzip"}
    request = httpx.Request("POST", f"{url}/lease?key=1", headers=headers)
    response = await body.fetch(
        request, connect_seconds=5.0, seconds=seconds, context=httpx.create_ssl_context()
    )
    return response, body.content


def http(status: str, body: bytes, length: int | None) -> bytes:
    announced = b"" if length is None else b"Content-Length: %d\r\n" % length
    return b"HTTP/1.1 " + status.encode() + b"\r\nContent-Type: a/b\r\n" + announced + b"\r\n" + body


@pytest.mark.parametrize("length", [300_000, None])
async def test_a_body_arrives_complete(length):
    async with answering(http("200 OK", bytes(range(250)) * 1_200, length)) as (url, asked):
        response, content = await fetch(url)
        assert (response.status_code, response.headers["content-type"]) == (200, "a/b")
        assert content == bytes(range(250)) * 1_200
        assert asked[0].startswith(b"POST /lease?key=1 HTTP/1.1\r\n")
        assert b"Bearer k" in asked[0]
        assert b"gzip" not in asked[0]


async def test_nothing_and_failures():
    async with answering(http("204 No Content", b"", None)) as (url, _):
        response, content = await fetch(url)
        assert (response.status_code, content) == (204, b"")
    async with answering(http("410 Gone", b'{"a": 1}', 8)) as (url, _):
        response, _ = await fetch(url)
        assert (response.status_code, response.json()) == (410, {"a": 1})


@pytest.mark.parametrize("answer", [http("200 OK", b"half", 8), b"", b"nonsense\r\n\r\n"])
async def test_a_broken_response_is_a_transport_error(answer):
    async with answering(answer) as (url, _):
        with pytest.raises(httpx.TransportError):
            await fetch(url)


async def test_a_silent_server_is_given_up():
    async with answering(http("200 OK", b"half", 8), hang=True) as (url, _):
        with pytest.raises(httpx.ReadTimeout):
            await fetch(url, seconds=0.05)
    with pytest.raises(httpx.TransportError):
        await fetch("http://127.0.0.1:1")


async def test_a_call_that_is_cancelled_closes_its_connection():
    async with answering(http("200 OK", b"half", 8), hang=True) as (url, asked):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch, url)
            await until(lambda: asked)
            tasks.cancel_scope.cancel()
        await until(lambda: asked[1:] == [b"gone"], 5)
