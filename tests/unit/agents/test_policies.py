"""The shipped policies are small, can be loaded, and use the chat format that the service renders."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api_schemas.trajectories import Message, ToolCall
from rollout_service.agents.tool_calling.builtin_tools import builtin_tools
from rollout_service.base.errors import ConfigurationError
from rollout_service.engines.shipped import POLICIES, policy_folder
from rollout_service.tokens import ChatRenderer
from tests.support.tokens.chat_formats import hub_tokenizer

MAX_BYTES = 6_000_000
TOOLS = [tool.definition for tool in builtin_tools(["python", "bash", "finish"])]
CALL = ToolCall(id="call-0", name="python", arguments={"code": "print(12*34)"}, raw="")
CONVERSATIONS = {
    "question": [Message(role="user", content="What is 12*34?")],
    "system": [Message(role="system", content="Be exact."), Message(role="user", content="12*34?")],
    "result": [
        Message(role="user", content="What is 12*34?"),
        Message(role="assistant", tool_calls=[CALL]),
        Message(role="tool", content="408", tool_call_id="call-0"),
    ],
    "parallel": [
        Message(role="user", content="What is 12*34?"),
        Message(role="assistant", content="Twice.", tool_calls=[CALL, CALL]),
        Message(role="tool", content="408"),
        Message(role="tool", content="408"),
    ],
    "second question": [
        Message(role="user", content="What is 12*34?"),
        Message(role="assistant", content="\\boxed{408}"),
        Message(role="user", content="And 5-6?"),
    ],
    "reasoning": [
        Message(role="user", content="What is 12*34?"),
        Message(role="assistant", reasoning="Use it.", tool_calls=[CALL]),
        Message(role="tool", content="408"),
    ],
}


def as_openai(message):
    content = {"role": message.role, "content": message.content}
    if message.tool_calls:
        content["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.reasoning:
        content["reasoning_content"] = message.reasoning
    return content


def test_the_policies_are_small_together():
    files = [file for name in POLICIES for file in policy_folder(name).iterdir()]
    assert sum(file.stat().st_size for file in files) <= MAX_BYTES


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigurationError) as caught:
        policy_folder("calc")
    assert "calc-tuned" in caught.value.hint


@pytest.mark.parametrize("name", POLICIES)
def test_the_settings_are_read_by_old_and_new_engines(name):
    folder = policy_folder(name)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["max_position_embeddings"] >= 2048
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["top_k"], generation["top_p"], generation["temperature"]) == (0, 1.0, 1.0)


@pytest.mark.parametrize("name", POLICIES)
def test_the_weights_fit_the_settings(name):
    folder = policy_folder(name)
    with (folder / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    config = json.loads((folder / "config.json").read_text())
    embedding = header["model.embed_tokens.weight"]
    assert embedding["dtype"] == "BF16"
    assert embedding["shape"] == [config["vocab_size"], config["hidden_size"]]
    assert config["vocab_size"] == ChatRenderer.load(folder).vocab_size


def test_the_policies_of_calc_have_the_same_tokenizer():
    base, tuned = (policy_folder(name) / "tokenizer.json" for name in ("calc-base", "calc-tuned"))
    assert base.read_bytes() == tuned.read_bytes()


def test_the_chat_format_is_derived_from_the_settings(renderer):
    assert renderer.name == "qwen3"
    assert [renderer.decode([token]) for token in renderer.stop_token_ids] == ["<|im_end|>", "<|endoftext|>"]


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("tools", [[], TOOLS[:1], TOOLS], ids=["no tools", "one tool", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_shipped_template_gives_the_ids_of_the_renderer(name, tools, thinking):
    renderer = ChatRenderer.load(policy_folder("calc-tuned"), "qwen3", {"enable_thinking": thinking})
    messages = CONVERSATIONS[name]
    templated = hub_tokenizer().apply_chat_template(
        [as_openai(message) for message in messages],
        tools=tools or None,
        add_generation_prompt=True,
        enable_thinking=thinking,
        return_dict=False,
    )
    assert list(templated) == renderer.render(messages, tools)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(number=st.integers(0, 10**20), before=st.sampled_from(["", " ", "(", "{", "a", "-"]))
def test_every_digit_is_a_token_of_its_own(renderer, number, before):
    pieces = [renderer.decode([token]) for token in renderer.encode(f"{before}{number}")]
    assert pieces[-len(str(number)) :] == list(str(number))


def test_the_prompt_of_calc_is_short(renderer):
    assert len(renderer.render([Message(role="user", content="What is 12*34?")], TOOLS[:1])) < 256
