"""The library still changes values of the formats in the table; one that it reads exactly can leave the table."""

import pytest

from rollout_service.tokens.arguments import SYNTAX
from tests.support.tokens.calls import TOOL, written
from tests.support.tokens.chat_formats import load


@pytest.mark.parametrize("family", sorted(SYNTAX))
def test_the_library_still_needs_help(tmp_path, family):
    renderer = load(tmp_path, family)
    arguments = {"text": " a\n", "maybe": "5"}
    prompt, output = written(renderer, arguments)
    parsed = renderer._backend.parse_response(output, tools=[TOOL], prompt_ids=prompt)
    assert [call.arguments for call in parsed.tool_calls] != [arguments], f"{family} can leave the table"
    assert [call.arguments for call in renderer.parse(output, prompt, [TOOL]).tool_calls] == [arguments]
