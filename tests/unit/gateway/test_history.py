"""A rollout can be stored whatever arguments its policy or its client writes into a call."""

import pytest

from api_schemas.trajectories import Message
from rollout_service.base import strict_json
from rollout_service.engines.shipped import policy_folder
from rollout_service.gateway.capture.history import as_messages
from rollout_service.gateway.contract import ClientMessage, ClientToolCall
from rollout_service.tokens import ChatRenderer

DEEP = '{"a": ' + "[" * 300 + "]" * 300 + "}"
ODD = {"deep": DEEP, "half a pair": '{"a": "x\\ud83d"}', "a key": '{"\\udc00": 1}', "not a number": '{"a": NaN}'}


def read(arguments: str) -> Message:
    [message] = as_messages([ClientMessage("assistant", calls=(ClientToolCall("c", "f", arguments),))], {})
    return message


@pytest.mark.parametrize("name", ODD)
def test_calls_that_a_client_sends_back_can_be_stored(name):
    assert strict_json.parse(read(ODD[name]).model_dump_json().encode())


def test_half_a_pair_in_arguments_becomes_the_replacement_character():
    assert read('{"a": "x\\ud83d", "b": "\\\\ud83d\\ud83d\\ude00"}').tool_calls[0].arguments == {
        "a": "x\ufffd",
        "b": "\\ud83d\U0001f600",
    }
    assert read("[1]").tool_calls[0].error == "arguments_not_an_object"


def test_calls_that_a_policy_nests_too_deep_are_malformed():
    renderer = ChatRenderer.load(policy_folder("calc-base"))
    call = f'<tool_call>\n{{"name": "f", "arguments": {DEEP}}}\n</tool_call>'
    [parsed] = renderer.parse([*renderer.encode(call), renderer.stop_token_ids[0]]).tool_calls
    assert (parsed.arguments, parsed.error) == (None, "arguments_not_json")
    assert strict_json.parse(parsed.model_dump_json().encode())
