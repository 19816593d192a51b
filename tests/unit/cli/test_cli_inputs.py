"""Inputs, scripts and children of the command line, and the verdict of the demo."""

import io
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout_service.cli import server_child
from rollout_service.cli.common import CommandError
from rollout_service.cli.demo.run import required_successes
from rollout_service.cli.env.engines import read_turns
from rollout_service.cli.server_child import running_server
from rollout_service.cli.submit.files import read_whole, reread

CONTENT = b'{"a": 1}\n' * 20_000


def _write(descriptor: int) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(CONTENT)


@pytest.fixture(params=["fifo", "descriptor", "stdin"])
def stream(request, tmp_path, monkeypatch):
    """Yield the path of a stream that holds the content."""
    if request.param == "stdin":
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(CONTENT)))
        yield Path("-")
        return
    if request.param == "fifo":
        path = tmp_path / "fifo"
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_bytes, args=[CONTENT])
    else:
        reading, writing = os.pipe()
        path = Path(f"/dev/fd/{reading}")
        writer = threading.Thread(target=_write, args=[writing])
    writer.start()
    yield path
    writer.join()
    if request.param == "descriptor":
        os.close(reading)


def test_a_stream_can_be_read_again(stream):
    with reread(stream) as path:
        assert path.read_bytes() == path.read_bytes() == CONTENT
    assert not path.exists()


def test_a_stream_is_read_whole(stream):
    assert read_whole(stream) == CONTENT


def test_a_file_is_not_copied(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(CONTENT)
    with reread(file) as path:
        assert path == file


def test_unreadable_input_is_named(tmp_path):
    for read in (read_whole, lambda path: reread(path).__enter__()):
        with pytest.raises(CommandError, match="missing cannot be read: No such file"):
            read(tmp_path / "missing")


@pytest.mark.parametrize(("rollouts", "needed"), [(1, 1), (2, 1), (8, 6), (32, 27), (64, 56), (500, 449)])
def test_few_rollouts_may_err_by_chance_and_many_may_not(rollouts, needed):
    assert required_successes(rollouts) == needed


@pytest.mark.slow
async def test_a_start_says_what_it_waits_for(tmp_path, monkeypatch):
    monkeypatch.setattr(server_child, "SAY_SECONDS", 0.05)
    said: list[str] = []
    with pytest.raises(CommandError, match="it does not listen yet"):
        async with running_server(tmp_path, ["--sandbox", "local"], start_seconds=0.3, say=said.append):
            pass
    assert said
    assert all(line.endswith(" s: it does not listen yet") for line in said)


@pytest.fixture
def script(tmp_path):
    def write(text: str):
        path = tmp_path / "script.jsonl"
        path.write_text(text)
        return path

    return write


def test_turns_are_written_as_a_policy_writes_them(script):
    call = '{"name": "bash", "arguments": {"command": "ls"}}'
    turns = read_turns(
        script(f'{{"content": "So.", "tool_calls": [{call}, {call}]}}\n\n{{"content": "42"}}\n')
    )
    wrapped = f"<tool_call>\n{call}\n</tool_call>"
    assert turns == [f"So.\n{wrapped}\n{wrapped}<|im_end|>", "42<|im_end|>"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"content": "a"}\n{"tool_calls": [{"arguments": {}}]}',
            r"line 2: tool_calls\.0\.name: Field required",
        ),
        ('{"contents": "a"}', "line 1: contents: unknown field; did you mean content"),
        ("{", "line 1: not valid JSON"),
        ("\n", "has no turns"),
    ],
)
def test_a_bad_line_is_named(script, text, said):
    with pytest.raises(CommandError, match=said):
        read_turns(script(text))


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(CommandError, match="cannot be read"):
        read_turns(tmp_path / "none.jsonl")
