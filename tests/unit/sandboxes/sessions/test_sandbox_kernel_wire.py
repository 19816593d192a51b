"""Kernel messages are untrusted: a malformed one, or one for another request, is dropped."""

import json
from pathlib import Path

import anyio
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from sandboxes.sessions.kernel_wire import DELIM, Wire, decode, make_context, make_session


def frames(kind: str, content: object, parent: object = None) -> list[bytes]:
    parts = (
        {"msg_id": "answer", "msg_type": kind, "version": "5.3"},
        parent or {"msg_id": "request"},
        {},
        content,
    )
    return [b"topic", DELIM, b"", *(json.dumps(part).encode() for part in parts)]


def test_an_answer_is_decoded():
    assert decode(make_session(), frames("stream", {"text": "hello"}), "request") == (
        "stream",
        {"text": "hello"},
    )


@pytest.mark.parametrize("parent", [{"msg_id": "another"}, ["request"], "request", 7])
def test_an_answer_to_another_request_is_dropped(parent):
    assert decode(make_session(), frames("stream", {}, parent), "request") is None


def test_invalid_utf8_and_json_are_survived():
    message = frames("stream", {})
    message[-1] = b'{"text": "\xff", "number": NaN}'
    found = decode(make_session(), message, "request")
    assert found is not None
    assert found[1]["text"] == "\ufffd"


@given(st.lists(st.binary(max_size=8) | st.just(DELIM) | st.just(b"{}"), max_size=8))
def test_any_frames_are_survived(message):
    assert decode(make_session(), message, "request") is None


@pytest.mark.parametrize("part", [b"[" * 100_000, b'{"a":' * 100_000, b"[]", b"null", b""])
def test_any_part_is_survived(part):
    for place in (-4, -3, -1):
        message = frames("stream", {})
        message[place] = part
        found = decode(make_session(), message, "request")
        assert found is None or found[1] == {} or place == -4


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("k")


async def test_a_request_and_a_flood_of_answers(folder):
    """Everything arrives in order, nothing before `listen` and nothing after `stop`."""
    context = make_context()
    try:
        with context.socket(zmq.ROUTER) as shell, context.socket(zmq.XPUB) as iopub:
            iopub.setsockopt(zmq.SNDHWM, 0)
            shell.bind(f"ipc://{folder}/shell")
            iopub.bind(f"ipc://{folder}/iopub")
            wire = Wire(context, folder / "shell", folder / "iopub", make_session())
            request = wire.execute("1 + 1")
            with anyio.fail_after(20):
                _, _, _, header, _, _, content = await anyio.to_thread.run_sync(shell.recv_multipart)
                await anyio.to_thread.run_sync(iopub.recv)  # the subscription
                assert json.loads(header)["msg_id"] == request
                assert json.loads(content)["code"] == "1 + 1"
                seen: list[str] = []
                done = anyio.Event()

                def take(kind: str, content: dict[str, object]) -> None:
                    seen.append(str(content["text"])[:8])
                    if len(seen) == 500:
                        done.set()

                wire.listen(request, take)  # type: ignore[arg-type]
                for number in range(500):
                    text = f"{number:08}" + "x" * 10_000
                    iopub.send_multipart(frames("stream", {"text": text}, {"msg_id": request}))
                await done.wait()
                wire.stop()
                iopub.send_multipart(frames("stream", {"text": "late"}, {"msg_id": request}))
                await anyio.sleep(0.05)
            assert seen == [f"{number:08}" for number in range(500)]
            wire.close()
            wire.close()
    finally:
        context.destroy(linger=0)


async def test_a_kernel_that_reads_nothing_cannot_hold_a_caller(folder):
    context = make_context()
    try:
        wire = Wire(context, folder / "shell", folder / "iopub", make_session())

        def flood() -> None:
            for _ in range(100_000):
                wire.execute("1")

        with pytest.raises(BlockingIOError):
            flood()
        wire.close()
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("code", ["'\ud800'", "print('ä')", "a\0b"])
async def test_any_text_can_be_sent(folder, code):
    context = make_context()
    try:
        with context.socket(zmq.ROUTER) as shell:
            shell.bind(f"ipc://{folder}/shell")
            wire = Wire(context, folder / "shell", folder / "iopub", make_session())
            wire.execute(code)
            with anyio.fail_after(20):
                content = (await anyio.to_thread.run_sync(shell.recv_multipart))[-1]
            assert json.loads(content)["code"] == code
            wire.close()
    finally:
        context.destroy(linger=0)
