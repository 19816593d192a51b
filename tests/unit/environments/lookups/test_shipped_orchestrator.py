"""The shipped orchestrator sees `pointers` and `split` in few tokens, and copies names and values piece by piece."""

import json

import pytest

from api_schemas.trajectories import Message
from rollout_service.agents.parallel.tools import RESULT_RULE
from rollout_service.engines.shipped import policy_folder
from rollout_service.environments.builtin.lookups import READ
from rollout_service.environments.builtin.pointers import environment as pointers
from rollout_service.environments.builtin.split import environment as split
from rollout_service.tokens import ChatRenderer


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer.load(policy_folder("parl-base"))


def written(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("environment", [pointers, split], ids=["pointers", "split"])
def test_the_prompt_is_short(renderer, environment):
    messages = environment.messages(environment.dataset()[0])
    assert len(renderer.render(messages, environment.tool_definitions())) < 64


def test_the_prompt_of_a_subagent_is_short(renderer):
    system = Message(role="system", content=f"Follow the pointer.\n\n{RESULT_RULE}")
    messages = [system, Message(role="user", content="A")]
    assert len(renderer.render(messages, [READ.definition])) < 32


@pytest.mark.parametrize(
    ("text", "most"),
    [
        (written("read", key="Q7"), 6),
        (written("assign_task", agent="a", prompt="Q"), 5),
        (written("create_subagent", name="a", system_prompt="Follow the pointer."), 3),
        (written("finish", answer="37+12"), 9),
        ("<result>37</result>", 4),
    ],
)
def test_a_call_is_a_few_tokens(renderer, text, most):
    ids = renderer.encode(text)
    assert len(ids) <= most
    assert renderer.decode(ids) == text


@pytest.mark.parametrize("name", ["Q7", "A B C", "37+12+90", "Q7 M2"])
def test_names_and_values_are_copied_piece_by_piece(renderer, name):
    ids = renderer.encode(f'"key": "{name}"}}')
    assert "".join(renderer.decode([token]) for token in ids) == f'"key": "{name}"}}'
    pieces = [renderer.decode([token]) for token in ids]
    assert all(character in pieces for character in name)
