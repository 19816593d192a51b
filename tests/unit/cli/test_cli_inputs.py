"""Inputs, scripts and children of the command line, and the verdict of the demo."""

import io
import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_schemas.tasks import Task
from rollout_service.base.strict_json import NOT_FINITE
from rollout_service.cli import server_child
from rollout_service.cli.common import CommandError
from rollout_service.cli.demo.run import required_successes
from rollout_service.cli.env.engines import read_turns
from rollout_service.cli.server_child import running_child
from rollout_service.cli.submit.files import RequestFile, ResultFile, read_whole, reread
from tests.support.samples import rollout

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
    monkeypatch.setattr(server_child, "START_SECONDS", 0.3)
    said: list[str] = []
    with pytest.raises(CommandError, match="it does not listen yet"):
        async with running_child(tmp_path, ["--sandbox", "local"], say=said.append):
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
    turns = read_turns(script(f'{{"content": "So.", "tool_calls": [{call}, {call}]}}\n\n{{"content": "42"}}\n'))
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


LINE = '{"task": {"environment": "calc", "instance": {"question": "1+1", "answer": 2}}}'


@pytest.fixture
def read(tmp_path):
    def read(text: str, environment: str | None = None):
        path = tmp_path / "my tasks.jsonl"
        path.write_text(text)
        bad = []
        requests = RequestFile(path, path.stem, lambda number, why: bad.append((number, why)), environment)
        return list(requests), bad, requests

    return read


def test_bad_lines_are_named_and_the_rest_is_read(read):
    requests, bad, _ = read(f'{LINE}\n{{"task"\n\n[1]\n{{"tusk": 1}}\n{LINE}\n')
    assert len(requests) == 2
    assert [number for number, _ in bad] == [2, 4, 5]
    assert "not JSON: " in bad[0][1]
    assert "not a JSON object" in bad[1][1]
    assert "task: Field required" in bad[2][1]
    assert "tusk: unknown field; did you mean task?" in bad[2][1]


def test_a_byte_order_mark_is_left_out_and_the_column_at_fault_is_named(read):
    requests, bad, _ = read(f'\ufeff{LINE}\n{{"task": 1, "score": NaN}}\n')
    assert requests[0].task == Task(environment="calc", instance={"question": "1+1", "answer": 2})
    assert bad == [(2, f"column 'score' has {NOT_FINITE}")]


def test_ids_follow_from_the_file_so_that_a_second_run_orders_nothing_twice(read):
    first, _, _ = read(f"{LINE}\n{LINE}\n")
    second, _, _ = read(f"{LINE}\n{LINE}\n")
    changed, _, _ = read(f"{LINE}\n{LINE.replace('1+1', '1+2')}\n")
    assert [item.rollout_id for item in first] == [item.rollout_id for item in second]
    assert len({item.rollout_id for item in first}) == 2
    assert changed[0].rollout_id == first[0].rollout_id
    assert changed[1].rollout_id != first[1].rollout_id


def test_a_callers_own_id_is_kept_and_must_be_unique(read):
    line = LINE.replace("{", '{"rollout_id": "mine", ', 1)
    requests, bad, file = read(f"{line}\n{line}\n")
    assert [item.rollout_id for item in requests] == ["mine"]
    assert bad == [(2, "line 1 has the same rollout_id mine")]
    assert file.lines == {"mine": 1}


def test_lines_may_be_instances(read):
    requests, bad, _ = read('{"question": "2*3"}\n', environment="calc")
    assert bad == []
    assert requests[0].task == Task(environment="calc", instance={"question": "2*3"})


@given(stem=st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=60))
def test_any_name_of_a_file_gives_a_valid_id(stem):
    file = RequestFile(Path("tasks"), stem, lambda number, why: pytest.fail(f"line {number}: {why}"))
    assert len(list(file._request(1, LINE.encode()))) == 1


def test_results_are_found_again(tmp_path):
    path = tmp_path / "new folder" / "results.jsonl"
    with ResultFile(path) as results:
        assert results.done == set()
        results.append(rollout("a"))
        results.append(rollout("b"))
    with ResultFile(path) as results:
        assert results.done == {"a", "b"}
    assert len(path.read_text().splitlines()) == 2


def test_a_torn_last_line_is_cut_off(tmp_path):
    path = tmp_path / "results.jsonl"
    with ResultFile(path) as results:
        results.append(rollout("a"))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    with ResultFile(path) as results:
        assert results.done == {"a"}
        results.append(rollout("b"))
    assert [json.loads(line)["rollout_id"] for line in path.read_text().splitlines()] == ["a", "b"]


@pytest.mark.parametrize("text", ["my notes\n", "my notes", '{"a": 1}', "[]\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"notes\.txt, line 1: not a rollout's result"), ResultFile(path):
        pass
    assert path.read_text() == text
