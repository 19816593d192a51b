"""generateContent: what is read from requests, and what clients are answered."""

import json
from typing import Any

import pytest

from api_schemas.trajectories import FinishReason
from rollout_service.base.errors import InvalidFieldError, UnauthorizedError
from rollout_service.gateway.contract import ClientMessage, ClientToolCall, Dialect, ModelCall, TextDelta
from rollout_service.gateway.dialects import CODECS, ListedModel
from rollout_service.gateway.dialects.google_requests import read_signature, sign
from rollout_service.gateway.errors import (
    ContextOverflowError,
    RefusedParameterError,
    UnsupportedContentError,
)
from tests.support.gateway import answers
from tests.support.gateway.answers import KEY, REASONING, TEXT, sse_events

WHOLE = "/v1beta/models/policy:generateContent"
STREAM = "/v1beta/models/policy:streamGenerateContent"
SSE = f"{STREAM}?key=k&alt=sse"
HELLO = {"role": "user", "parts": [{"text": "hello"}]}


def read(path: str = WHOLE, **more: object) -> ModelCall:
    return answers.read(Dialect.GOOGLE, {"contents": [HELLO], **more}, path=path)


def joined(chunks: list[Any]) -> list[dict[str, Any]]:
    """Return the parts of all chunks, texts of one kind joined and empty ones left out."""
    parts: list[dict[str, Any]] = []
    for chunk in chunks:
        for part in chunk["candidates"][0]["content"]["parts"]:
            before = parts[-1] if parts else {}
            if "text" in part and "text" in before and part.get("thought") == before.get("thought"):
                before["text"] += part["text"]
            elif part.get("text") != "":
                parts.append(dict(part))
    return parts


def test_a_history_is_read_part_by_part():
    history = [
        {"parts": [{"text": "a"}, {"text": "b"}]},
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True},
                {"text": "x"},
                {"text": ""},
                {
                    "functionCall": {"id": "c1", "name": "f", "args": {"b": 1.0}},
                    "thoughtSignature": sign(KEY, "c1"),
                },
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": "c1", "name": "f", "response": {"output": "ok"}}},
                {"text": "go on"},
            ],
        },
    ]
    assert read(contents=history, systemInstruction={"parts": [{"text": "act"}]}).messages == (
        ClientMessage("system", "act"),
        ClientMessage("user", "a\n\nb"),
        ClientMessage("assistant", "x", "hm", (ClientToolCall("c1", "f", '{"b":1.0}'),), turn_key=KEY),
        ClientMessage("tool", "ok", call_id="c1", tool_name="f"),
        ClientMessage("user", "go on"),
    )


def test_the_contents_of_one_answer_are_one_message():
    def model(**part: object) -> dict[str, object]:
        return {"role": "model", "parts": [part]}

    signed = {"thoughtSignature": sign(KEY, "c1")}
    history = [
        HELLO,
        model(text="hm", thought=True),
        model(text="x"),
        model(functionCall={"name": "f", "args": {}}, **signed),
        model(text=""),
        {"role": "user", "parts": [{"functionResponse": {"name": "f", "response": {"result": "1"}}}]},
        model(text="a"),
        model(text="", thoughtSignature=sign("other")),
        model(text="b", thoughtSignature=sign("third")),
    ]
    assert read(contents=history).messages[1:] == (
        ClientMessage("assistant", "x", "hm", (ClientToolCall("c1", "f", "{}"),), turn_key=KEY),
        ClientMessage("tool", "1", call_id="c1", tool_name="f"),
        ClientMessage("assistant", "a", turn_key="other"),
        ClientMessage("assistant", "b", turn_key="third"),
    )


def test_calls_and_responses_without_ids_get_them_from_signatures_and_by_order():
    def call(name: str, call_id: str) -> dict[str, object]:
        return {"functionCall": {"name": name, "args": {}}, "thoughtSignature": sign(KEY, call_id)}

    def response(name: str, text: str) -> dict[str, object]:
        return {"functionResponse": {"name": name, "response": {"name": name, "content": text}}}

    history = [
        HELLO,
        {"role": "model", "parts": [call("f", "c1"), call("g", "c2"), call("f", "c3")]},
        {"role": "user", "parts": [response("f", "1"), response("f", "3"), response("g", "2")]},
    ]
    _, answer, *results = read(contents=history).messages
    assert [made.id for made in answer.calls] == ["c1", "c2", "c3"]
    assert [(result.call_id, result.text) for result in results] == [("c1", "1"), ("c3", "3"), ("c2", "2")]


def test_a_signature_of_another_service_is_the_key_of_no_turn():
    assert read_signature("not base64!") == ("not base64!", None)
    assert read_signature(sign("a-1", "call_x.y")) == ("a-1", "call_x.y")
    assert read_signature(sign("a-1")) == ("a-1", None)


def test_a_response_with_more_than_a_text_is_read_as_json():
    response = {"name": "f", "response": {"output": "a", "code": 1}}
    [message] = read(contents=[{"role": "user", "parts": [{"functionResponse": response}]}]).messages
    assert message.text == '{"output":"a","code":1}'


def test_a_schema_may_have_its_counts_as_texts_and_underscores_in_its_keywords():
    texts = {"type": "STRING", "min_length": "1", "maxLength": 9, "default": {"min_length": "1"}}
    schema = {
        "type": "ARRAY",
        "items": texts,
        "minItems": "2",
        "maxItems": "many",
        "min_properties": "9" * 5_000,
        "property_ordering": ["a"],
    }
    assert read(generationConfig={"responseSchema": schema}).json_schema == {
        "type": "array",
        "items": {"type": "string", "minLength": 1, "maxLength": 9, "default": {"min_length": "1"}},
        "minItems": 2,
        "maxItems": "many",
        "minProperties": "9" * 5_000,
    }


def test_parameters_reach_the_call_in_either_spelling():
    schema = {
        "type": "OBJECT",
        "properties": {"type": {"type": "STRING", "nullable": True}},
        "required": ["type"],
    }
    plain = {"type": "object", "properties": {"type": {"type": ["string", "null"]}}, "required": ["type"]}
    for call in (
        read(
            generationConfig={
                "maxOutputTokens": 9,
                "stopSequences": ["END"],
                "topK": 64,
                "responseSchema": schema,
            },
            tools=[{"functionDeclarations": [{"name": "f", "parameters": schema}]}, {"googleSearch": {}}],
            toolConfig={"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
            safetySettings=[{}],
        ),
        read(
            generation_config={
                "max_output_tokens": 9,
                "stop_sequences": ["END"],
                "top_k": 64,
                "response_schema": schema,
            },
            tools=[
                {"function_declarations": [{"name": "f", "parameters_json_schema": plain}]},
                {"googleSearch": {}},
            ],
            tool_config={"function_calling_config": {"mode": "ANY", "allowed_function_names": ["f"]}},
            safety_settings=[{}],
        ),
    ):
        assert (call.model, call.stream, call.max_tokens, call.stop) == ("policy", False, 9, ("END",))
        assert call.json_schema == plain
        assert call.tools[0]["function"]["parameters"] == plain
        assert call.requested["top_k"] == 64
        assert set(call.requested) == {"top_k", "toolConfig.functionCallingConfig"}
        assert call.ignored == ("safetySettings", "tools[].googleSearch")


def test_a_request_to_count_tokens_may_wrap_another():
    call = answers.read(Dialect.GOOGLE, {"generateContentRequest": {"contents": [HELLO]}})
    assert call.messages == (ClientMessage("user", "hello"),)
    assert json.loads(CODECS[Dialect.GOOGLE].token_count(3)) == {"totalTokens": 3}


@pytest.mark.parametrize(
    ("change", "error", "path"),
    [
        ({"contents": []}, InvalidFieldError, "contents"),
        ({"contents": [{"role": "robot"}]}, InvalidFieldError, "contents.0.role"),
        ({"contents": [{"parts": [{"inlineData": {}}]}]}, UnsupportedContentError, "contents.0.parts.0"),
        (
            {"contents": [{"parts": [{"functionResponse": {"name": "f", "parts": [{"inline_data": {}}]}}]}]},
            UnsupportedContentError,
            "contents.0.parts.0.functionResponse.parts",
        ),
        (
            {"contents": [{"role": "model", "parts": [{"functionCall": {}}]}]},
            InvalidFieldError,
            "contents.0.parts.0.functionCall.name",
        ),
        (
            {"generationConfig": {"responseLogprobs": True}},
            RefusedParameterError,
            "generationConfig.responseLogprobs",
        ),
        (
            {"generationConfig": {"responseModalities": ["IMAGE"]}},
            UnsupportedContentError,
            "generationConfig.responseModalities",
        ),
        (
            {"generationConfig": {"maxOutputTokens": 0}},
            InvalidFieldError,
            "generationConfig.maxOutputTokens",
        ),
        ({"cachedContent": "x"}, RefusedParameterError, "cachedContent"),
        ({"systemInstruction": 4}, InvalidFieldError, "systemInstruction"),
    ],
)
def test_what_cannot_be_read_is_named(change, error, path):
    with pytest.raises(error) as caught:
        read(**change)
    assert [field.path for field in caught.value.fields] == [path]
    told = json.loads(CODECS[Dialect.GOOGLE].error(caught.value).body)["error"]
    assert (told["code"], told["status"]) == (400, "INVALID_ARGUMENT")
    assert told["details"][0]["fieldViolations"][0]["field"] == path


def test_a_repeated_request_may_have_another_limit():
    first = read()
    assert read(generationConfig={"maxOutputTokens": 9}).fingerprint == first.fingerprint
    assert read(generation_config={"max_output_tokens": 7}).fingerprint == first.fingerprint
    assert read(generationConfig={"stopSequences": ["x"]}).fingerprint != first.fingerprint


def test_candidates_are_refused_in_a_stream_only():
    assert read(generationConfig={"candidateCount": 2}).n == 2
    with pytest.raises(RefusedParameterError):
        read(STREAM, generationConfig={"candidateCount": 2})


def test_a_stream_carries_the_parts_of_the_whole_answer():
    events = answers.full_answer()
    chunks = [data for _, data in sse_events(answers.stream(read(SSE), events))]
    parts = joined(chunks)
    whole = answers.whole(read(), events)
    assert parts == whole["candidates"][0]["content"]["parts"]
    assert parts == [
        {"text": REASONING, "thought": True},
        {"text": TEXT},
        {
            "functionCall": {"id": "call_0", "name": "bash", "args": {"command": "naïve"}},
            "thoughtSignature": sign(KEY, "call_0"),
        },
        {
            "functionCall": {"id": "call_1", "name": "read", "args": {"path": "a"}},
            "thoughtSignature": sign(KEY, "call_1"),
        },
    ]
    assert [chunk["candidates"][0].get("finishReason") for chunk in chunks[-2:]] == [None, "STOP"]
    assert chunks[-1]["usageMetadata"] == whole["usageMetadata"]
    assert whole["usageMetadata"] == {
        "promptTokenCount": 100,
        "cachedContentTokenCount": 60,
        "candidatesTokenCount": 15,
        "thoughtsTokenCount": 5,
        "totalTokenCount": 120,
    }


def test_a_stream_may_be_a_list():
    request = read(STREAM)
    chunks = json.loads(answers.stream(request, answers.full_answer()))
    assert joined(chunks) == joined([data for _, data in sse_events(answers.stream(read(SSE), answers.full_answer()))])
    writer = CODECS[Dialect.GOOGLE].open_stream(request)
    assert writer.media_type == "application/json"
    broken = json.loads(writer.keep_alive() + writer.fail(ContextOverflowError(2, 1)))
    assert broken[-1]["error"]["status"] == "INVALID_ARGUMENT"


def test_a_text_carries_the_key_of_its_turn():
    events = answers.answer([TextDelta("hi")], finish=FinishReason.LENGTH)
    for candidate in (
        answers.whole(read(), events)["candidates"][0],
        sse_events(answers.stream(read(SSE), events))[-1][1]["candidates"][0],
    ):
        assert candidate["finishReason"] == "MAX_TOKENS"
        echo = read(contents=[HELLO, candidate["content"]]).messages[1]
        assert echo.turn_key == KEY


def test_a_malformed_call_is_text():
    events = answers.answer(answers.call(0, "c", "bash", '{"a', error="not JSON"))
    [part] = answers.whole(read(), events)["candidates"][0]["content"]["parts"]
    assert part["text"] == 'bash({"a)'
    assert joined([data for _, data in sse_events(answers.stream(read(SSE), events))])[0]["text"] == part["text"]


def test_a_keep_alive_is_an_empty_part():
    [(_, held)] = sse_events(CODECS[Dialect.GOOGLE].open_stream(read(SSE)).keep_alive())
    assert held["candidates"][0]["content"]["parts"] == [{"text": ""}]


def test_errors_have_the_form_that_clients_know():
    codec = CODECS[Dialect.GOOGLE]
    told = json.loads(codec.error(ContextOverflowError(200, 100)).body)["error"]
    assert (told["code"], told["status"]) == (400, "INVALID_ARGUMENT")
    assert "(200) exceeds the maximum number of tokens allowed (100)" in told["message"]
    assert json.loads(codec.error(UnauthorizedError("no")).body)["error"]["status"] == "UNAUTHENTICATED"


def test_a_list_of_models():
    [model] = json.loads(CODECS[Dialect.GOOGLE].models([ListedModel("m", 4096)]))["models"]
    assert (model["name"], model["inputTokenLimit"]) == ("models/m", 4096)
