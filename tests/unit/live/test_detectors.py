"""The reward and the next state of a turn come from what the user says and does afterwards."""

import json
import time
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import EntryPoint

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.base.errors import ConfigurationError
from rollout_service.gateway.contract import ClientMessage, ClientToolCall
from rollout_service.live import detectors
from rollout_service.live.detectors import BUILT_IN, Detectors
from rollout_service.live.recorder import next_state, says_error

HERE = __name__
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.c2lnbmF0dXJlLW9mLWl0"
OPENAI = "sk-" + "proj-aB3dE6gH9" * 4
GITHUB = "ghp_" + "a1B2" * 9
FOUND = [
    ("secrets", "private_key", "-----BEGIN RSA PRIVATE KEY-----\nMIIE"),
    ("secrets", "private_key", "-----BEGIN OPENSSH PRIVATE KEY-----"),
    ("secrets", "private_key", "-----BEGIN PGP PRIVATE KEY BLOCK-----"),
    ("secrets", "aws_key", "AWS_ACCESS_KEY_ID=AKIAIOSFODNN7EXAMPLE"),
    ("secrets", "aws_secret", "aws_secret_access_key = " + "wJalrXUtnFEMI/K7MDEN" * 2),
    ("secrets", "aws_secret", '{"SecretAccessKey": "' + "wJalrXUtnFEMI/K7MDEN" * 2 + '"}'),
    ("secrets", "github_token", f"git clone https://x:{GITHUB}@github.com/a/b"),
    ("secrets", "github_token", "github_pat_" + "11ABCDEFG0_x" * 3),
    ("secrets", "api_key", f"export OPENAI_API_KEY={OPENAI}"),
    ("secrets", "api_key", f'{{"cmd": "echo\\n{OPENAI}"}}'),
    ("secrets", "api_key", "sk-ant-api03-" + "Zx9_" * 20),
    ("secrets", "google_key", "AIza" + "Sy1_" * 8 + "abc"),
    ("secrets", "slack_token", "xoxb-" + "123456789012-abc"),
    ("secrets", "bearer_token", "Authorization: Bearer 0123456789abcdef01234567"),
    ("secrets", "jwt", f"token={JWT}"),
    ("emails", "email", "write to ann.o'neil+x@mail.example.co.uk, please"),
    ("emails", "email", "jürgen@bücher.example"),
    ("cards", "card", "4242 4242 4242 4242"),
    ("cards", "card", "card=5555555555554444;"),
    ("cards", "card", "3782-822463-10005"),
    ("phones", "phone", "call +49 (30) 901820-00"),
    ("phones", "phone", "(555) 123-4567"),
]
CLEAN = [
    "-----BEGIN PUBLIC KEY-----",
    "class sk-fading-circle-with-a-long-name-here",
    "my-task-sk-learn",
    "AKIA is a prefix",
    "Bearer authentication-is-what-we-use-here-today",
    "git@github.com:someone/project.git",
    "a @decorator and x @ y",
    "0.4242424242424242",
    "4242 4242 4242 4243",
    "1732550000123456789",
    "2024-01-02 10:11:12, 192.168.100.200",
    "123e4567-e89b-12d3-a456-426614174000",
    "eyJ is how base64 of JSON begins",
]
HOSTILE = [
    "eyJ",
    "a",
    "@",
    "a@a.",
    "4",
    "4242 ",
    "1 ",
    "+1 ",
    "bearer ",
    "sk-",
    "A ",
    "-----BEGIN ",
    "ghp_a",
    "\\n",
]


def finds_words(text: str) -> Iterable[str]:
    return ["word"] * text.count("xyzzy")


def finds_spans(text: str) -> Iterable[tuple[int, int]]:
    at = text.find("xyzzy")
    return [(at, at + 5)] if at >= 0 else []


def fails(text: str) -> Iterable[str]:
    raise RuntimeError(f"cannot search {text}")


def plugin(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, f"{HERE}:{value}", detectors.GROUP)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "text"), FOUND)
def test_it_is_found_and_counted_by_its_kind(name, kind, text):
    assert Detectors.load([name]).find([text])[kind] == 1


@pytest.mark.parametrize("text", CLEAN)
def test_what_only_looks_similar_is_not_found(text):
    assert Detectors.load(BUILT_IN).find([text]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("piece", HOSTILE)
def test_a_hostile_line_of_a_megabyte_takes_little_time(piece):
    text = (piece * 1_000_000)[:1_000_000]
    started = time.thread_time()
    Detectors.load(BUILT_IN).find([text])
    assert time.thread_time() - started < 3.0


@pytest.mark.slow
@given(
    st.lists(st.sampled_from([OPENAI, GITHUB, JWT, "a b", "\n", " ", "x" * 40, "-"]), max_size=20),
    st.integers(1, 90),
)
def test_windows_change_no_count(pieces, window):
    text = " ".join(pieces)
    whole = Detectors.load(["secrets"]).find([text])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detectors, "_WINDOW", window)
        assert Detectors.load(["secrets"]).find([text]) == whole


PIECES = [text for _, _, text in FOUND]
ENDS = [
    "",
    "-----BEGIN ",
    "secret_access_key",
    "bearer",
    "git",
    "a.b",
    "+4",
    "sk-",
    "4111",
    "\0",
    " ",
    "@",
    "\\n",
]


@given(st.lists(st.sampled_from([*PIECES, *(text[:half] for text in PIECES for half in (9, 17)), *ENDS]), max_size=8))
def test_texts_that_are_searched_together_are_searched_as_they_are(texts):
    found = Detectors.load(BUILT_IN)
    alone = sum((Counter(found.find([text])) for text in texts), Counter())
    assert found.find(texts) == dict(alone)


def test_finds_of_all_texts_are_added_up():
    assert Detectors.load(["secrets", "secrets"]).find([JWT, f"{JWT} {JWT}", ""]) == {"jwt": 3}
    assert Detectors.load([]).find([JWT]) == {}


@pytest.mark.parametrize("padding", [0, 100_000])
async def test_searching_long_texts_finds_the_same(padding):
    assert await Detectors.load(["secrets"]).search(["." * padding + JWT]) == {"jwt": 1}


def test_plug_ins_report_kinds_or_spans():
    plugins = [plugin("words", "finds_words"), plugin("spans", "finds_spans")]
    found = Detectors.load(["words", "spans"], plugins=plugins).find(["xyzzy xyzzy"])
    assert found == {"word": 2, "spans": 1}


def test_a_plug_in_that_fails_counts_as_a_find(capsys):
    assert Detectors.load(["bad"], plugins=[plugin("bad", "fails")]).find(["my secret"]) == {"bad:failed": 1}
    assert "my secret" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("secret", "there is no 'secret'; did you mean secrets"),
        ("gone", "'gone' .* cannot be loaded: AttributeError"),
        ("text", "'text' .* is not a function"),
    ],
)
def test_a_detector_that_is_not_there_is_refused(name, message):
    with pytest.raises(ConfigurationError, match=message):
        Detectors.load([name], plugins=[plugin("gone", "nothing"), plugin("text", "JWT")])


def test_all_results_of_three_calls_are_in_the_text_with_their_tools():
    messages = [
        ClientMessage("tool", "one", call_id="a"),
        ClientMessage("tool", "two", call_id="b", tool_name="read"),
        ClientMessage("tool", "three"),
    ]
    state = next_state(messages, 5.0, {"a": "bash"})
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
    assert (state.role, state.text) == ("mixed", "[tool ls]\na.txt\n\n[user]\nthanks")


def test_where_nobody_says_anything_there_is_no_next_state():
    assert next_state([], 0.0) is None
    assert next_state([ClientMessage("assistant", "hm"), ClientMessage("system", "go on")], 0.0) is None


@given(st.lists(st.tuples(st.sampled_from(["user", "tool"]), st.text()), min_size=1, max_size=5))
def test_nothing_is_cut(said):
    state = next_state([ClientMessage(role, text) for role, text in said], 0.0)  # type: ignore[arg-type]
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
        pytest.param('{"a":[' + "[]," * 20_000 + '1], "error": "x"}', False, id="too many values"),
        ("", False),
    ],
)
def test_a_result_that_says_so_is_an_error(result, failed):
    assert says_error(result) is failed
    state = next_state([ClientMessage("tool", "fine"), ClientMessage("tool", result)], 0.0)
    assert state.is_error is failed


def test_a_field_of_its_own_says_it_too_and_a_user_never_does():
    flagged = next_state([ClientMessage("tool", "denied", is_error=True)], 0.0)
    assert flagged.is_error
    user = next_state([ClientMessage("user", "Error: this is what I got")], 0.0)
    assert not user.is_error
