"""A scripted model's file holds turns in the policies' own format, and bad lines are named."""

import pytest

from rollout_service.cli.common import CommandError
from rollout_service.cli.env.engines import read_turns


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
