"""The forms of E2B's clients are read as they were sent, in any pieces; broken ones and hostile listings are errors."""

import grp
import gzip
import os
import pwd
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.filesystem import filesystem_pb
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import Request

from rollout_service.base.errors import RequestError, TooLargeError
from rollout_service.server.e2b import files
from rollout_service.server.e2b.boxes import CURRENT_BOX, Boxes
from rollout_service.server.e2b.control import BoxQuery
from rollout_service.server.e2b.transfer import PIECE, MultipartForm, _bounded, _decoded
from rollout_service.settings.http import E2BApiSettings
from sandboxes.config import PressureConfig
from sandboxes.scheduling.admission import AdmissionController
from sandboxes.scheduling.pressure import HostMetrics, PressureController

BOUNDARY = b"b0undary"
NEAR = st.sampled_from([b"\r", b"\n", b"-", b"\r\n", b"\r\n--", b"\r\n--b0undar", b"--b0undary", b"x"])
CONTENT = st.one_of(st.binary(max_size=200), st.lists(NEAR, max_size=20).map(b"".join)).filter(
    lambda data: b"\r\n--" + BOUNDARY not in b"\r\n" + data + b"\r\n"
)
NAME = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="%"), min_size=1, max_size=40)


async def pieces_of(data: bytes, sizes: Iterable[int]) -> AsyncIterator[bytes]:
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size
    yield data[at:]


async def read_form(data: bytes, sizes: Iterable[int] = ()) -> list[tuple[str, bytes]]:
    form = MultipartForm(pieces_of(data, sizes), BOUNDARY)
    return [(name, b"".join([piece async for piece in form.data()])) async for name in form.names()]


@given(st.lists(st.tuples(NAME, CONTENT), min_size=1, max_size=5), st.lists(st.integers(0, 30), max_size=50))
@example([('a"b\\c;é', b"\r\n--b0undar")], [1] * 200)
async def test_any_files_arrive_as_they_were_sent(sent, sizes):
    parts = [("file", (name, data)) for name, data in sent]
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"}
    body = httpx.Request("POST", "http://x", files=parts, headers=headers).read()
    assert await read_form(body, sizes) == sent


@given(st.one_of(st.binary(max_size=100), st.lists(NEAR, max_size=30).map(b"".join)), st.integers(0, 40))
async def test_a_broken_form_is_an_error_and_nothing_else(data, cut):
    whole = httpx.Request(
        "POST",
        "http://x",
        files=[("file", ("n", data))],
        headers={"Content-Type": f"multipart/form-data; boundary={BOUNDARY.decode()}"},
    ).read()
    for body in (data, whole[: max(0, len(whole) - 5 - cut)]):
        if b"--" + BOUNDARY + b"--" not in body:
            with pytest.raises(RequestError):
                await read_form(body)


async def decoded(body: bytes, encoding: str = "gzip", limit: int = 10**6) -> bytes:
    async def receive():
        return {"type": "http.request", "body": body}

    request = Request(
        {"type": "http", "method": "POST", "headers": [(b"content-encoding", encoding.encode())]}, receive
    )
    found = [piece async for piece in _bounded(_decoded(request), limit)]
    assert max(map(len, found)) <= PIECE
    return b"".join(found)


@given(st.binary(max_size=1_000), st.integers(1, 300), st.lists(st.binary(max_size=9), max_size=3))
async def test_what_is_compressed_is_unpacked_piece_by_piece(data, times, more):
    parts = [data * times, *more]
    assert await decoded(b"".join(map(gzip.compress, parts))) == b"".join(parts)


async def test_what_unpacks_to_too_much_or_is_broken_is_an_error():
    bomb = gzip.compress(b"\0" * 5_000_000)
    with pytest.raises(TooLargeError):
        await decoded(bomb)
    broken = b"no gzip", bomb[:-10], bomb + b"more"
    for body, encoding in (*((body, "gzip") for body in broken), (b"x", "br")):
        with pytest.raises(RequestError):
            await decoded(body, encoding, 10**9)


@given(st.lists(st.text(max_size=20), min_size=9, max_size=11))
@example([*"dd", "0", "755", "rwxr-xr-x", "a", "a", "9" * 99 + ".5", "", "/x"])
def test_whatever_a_hostile_find_prints_is_an_entry_or_a_typed_error(row):
    try:
        entry = files._entry(row)
    except ConnectError:
        return
    assert 0 <= entry.modified_time.seconds <= files.LAST_SECOND


async def test_owners_have_names_and_a_missing_folder_is_not_found(local_sandbox):
    CURRENT_BOX.set(SimpleNamespace(sandbox=local_sandbox))  # type: ignore[arg-type]
    await local_sandbox.write_file("d/:0:", "x")
    calls = files.FilesystemCalls()
    [entry] = (await calls.list_dir(filesystem_pb.ListDirRequest(path="d"), None)).entries
    user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name
    assert (entry.name, entry.owner, entry.group, entry.size) == (":0:", user, group, 1)
    with pytest.raises(ConnectError) as caught:
        await calls.stat(filesystem_pb.StatRequest(path="d/none"), None)
    assert caught.value.code == Code.NOT_FOUND
    assert files._names_in("a:x:7:\n:\nb:x:7:0\nc:x:8") == {"7": "a", "8": "c"}


@pytest.mark.parametrize(
    ("query", "is_found"),
    [
        ({"startedAfter": "0001-01-01T00:00:00"}, True),
        ({"startedAfter": "9999-12-31T23:59:59-12:00"}, False),
        ({"startedAfter": "2026-01-01T00:00:00Z"}, True),
        ({"metadata": "job="}, True),
        ({"metadata": "job=1"}, False),
        ({"metadata": "other="}, False),
        ({"metadata": ""}, True),
    ],
)
def test_any_moment_and_empty_values_may_be_asked_for(query, is_found):
    new = SimpleNamespace(template="base", metadata={"job": ""})
    box: Any = SimpleNamespace(new=new, state="running", began=datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC))
    assert BoxQuery.model_validate(query).has(box) is is_found


@pytest.mark.parametrize(("stall", "says"), [(99.0, "under pressure: cpu: "), (0.0, "e2b.max_sandboxes")])
def test_a_refused_creation_names_the_pressure_of_the_host(stall, says):
    pressure = PressureController(PressureConfig(), 8, 2)
    pressure.update(HostMetrics(cpus=2, cpu_stall=stall), used=0, waiting=1)
    admission = AdmissionController(pressure, HostMetrics, ceiling=8)
    boxes = Boxes(E2BApiSettings(), SimpleNamespace(), admission, lambda: False)
    refused = boxes._no_place()
    assert says in f"{refused} {refused.hint}"
