"""What followed an answer holds all that the client said since, with its roles and tools."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.gateway.contract import ClientMessage, ClientToolCall
from rollout_service.live.recorder import next_state, says_error


def test_all_results_of_three_calls_are_in_the_text_with_their_tools():
    messages = [
        ClientMessage("tool", "one", call_id="a"),
        ClientMessage("tool", "two", call_id="b", tool_name="read"),
        ClientMessage("tool", "three"),
    ]
    state = next_state(messages, 5.0, {"a": "bash"})
    assert state is not None
    assert (state.role, state.is_error, state.arrived_at) == ("tool", False, 5.0)
    assert state.text == "[tool bash]\none\n\n[tool read]\ntwo\n\n[tool]\nthree"


def test_results_and_words_are_mixed():
    call = ClientToolCall("c", "ls", "{}")
    messages = [
        ClientMessage("assistant", "let me see", calls=(call,)),
        ClientMessage("system", "be brief"),
        ClientMessage("tool", "a.txt", call_id="c"),
        ClientMessage("user", "thanks"),
    ]
    state = next_state(messages, 0.0)
    assert state is not None
    assert (state.role, state.text) == ("mixed", "[tool ls]\na.txt\n\n[user]\nthanks")


def test_where_nobody_says_anything_there_is_no_next_state():
    assert next_state([], 0.0) is None
    assert next_state([ClientMessage("assistant", "hm"), ClientMessage("system", "go on")], 0.0) is None


@given(st.lists(st.tuples(st.sampled_from(["user", "tool"]), st.text()), min_size=1, max_size=5))
def test_nothing_is_cut(said):
    state = next_state([ClientMessage(role, text) for role, text in said], 0.0)  # type: ignore[arg-type]
    assert state is not None
    assert state.text == "\n\n".join(f"[{role}]\n{text}" for role, text in said)


@pytest.mark.parametrize(
    ("result", "failed"),
    [
        ("Error: no such file", True),
        ("<tool_use_error>gone</tool_use_error>", True),
        ("Traceback (most recent call last):\n  File", True),
        (json.dumps({"status": "error"}), True),
        (json.dumps({"isError": True, "content": []}), True),
        (json.dumps({"error": {"code": 3}}), True),
        (json.dumps({"success": False}), True),
        (json.dumps({"error": None, "status": "ok"}), False),
        (json.dumps({"error": 0, "success": 1}), False),
        ("no errors found", False),
        ("errors.py", False),
        ("{", False),
        ("[" * 100_000, False),
        ("{" + '"a":{' * 100_000, False),
        ("", False),
    ],
)
def test_a_result_that_says_so_is_an_error(result, failed):
    assert says_error(result) is failed
    state = next_state([ClientMessage("tool", "fine"), ClientMessage("tool", result)], 0.0)
    assert state is not None
    assert state.is_error is failed


def test_a_field_of_its_own_says_it_too_and_a_user_never_does():
    flagged = next_state([ClientMessage("tool", "denied", is_error=True)], 0.0)
    assert flagged is not None
    assert flagged.is_error
    user = next_state([ClientMessage("user", "Error: this is what I got")], 0.0)
    assert user is not None
    assert not user.is_error
