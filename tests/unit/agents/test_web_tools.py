"""Searches and pages come through the sandbox, bounded and as text, and failures are said to the agent."""

import json
import socket
import sys
import threading
import time
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rollout_service.agents.tool_calling.builtin_tools import BUILTIN_TOOLS
from rollout_service.agents.tool_calling.tools import ToolContext, ToolInputError, by_name
from rollout_service.agents.web import browse, search
from rollout_service.agents.web.page_text import page_text
from rollout_service.agents.web.search import SearchFailedError, SearchSettings, search_tool
from rollout_service.base.errors import ConfigurationError, describe
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import EnvironmentSpec
from tests.support.web_server import web_server

RESULTS = [
    {"title": "A &amp; <b>B</b>", "url": "https://a.example/", "content": "first\nline <em>one</em>"},
    {"title": "Second", "url": "https://b.example/?x=1&y=2", "content": None},
    "no result",
    {"title": "Third", "url": "https://c.example/", "content": "x"},
]


class Seeking(AgentEnvironment):
    async def evaluate(self, episode):
        raise NotImplementedError


class Service:
    """A search service that answers as it is told, and keeps what it was asked."""

    def __init__(self):
        self.asked = []
        self.answers = []

    def __call__(self, asked):
        self.asked.append(parse_qs(urlsplit(asked.path).query))
        if self.answers:
            return self.answers.pop(0)
        return answer({"results": RESULTS})


def answer(value, status=200):
    return status, {"content-type": "application/json"}, json.dumps(value).encode()


@pytest.fixture
def service(monkeypatch):
    monkeypatch.setattr(search, "PAUSES", (0.0, 0.0))
    service = Service()
    with web_server(service) as address:
        service.url = f"http://{address}/search"
        yield service


async def ask(service, words="what", output_chars=4_000, seconds=20.0, **settings):
    tool = search_tool(SearchSettings(url=service.url, **settings))
    return (await tool({"query": words}, ToolContext(None, seconds, output_chars))).text


async def test_results_become_text(service):
    assert await ask(service, "2+2 & more", parameters={"format": "json"}, max_results=3) == (
        "A & B\nhttps://a.example/\nfirst line one\n\n"
        "Second\nhttps://b.example/?x=1&y=2\n\n"
        "Third\nhttps://c.example/\nx"
    )
    assert service.asked == [{"q": ["2+2 & more"], "format": ["json"]}]


async def test_a_service_on_this_machine_is_asked_without_a_proxy(service, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    assert "Second" in await ask(service)


async def test_a_proxy_that_cannot_be_used_is_a_failure_of_the_search(monkeypatch):
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "socksio", None)
    tool = search_tool(SearchSettings(url="http://search.example/search"))
    with pytest.raises(SearchFailedError, match="SOCKS proxy"):
        await tool({"query": "what"}, ToolContext(None, 20.0, 4_000))


async def test_keys_of_other_services_are_named(service):
    service.answers = [answer({"web": {"hits": [{"name": "N", "link": "https://n.example/", "snippet": "S"}]}})]
    keys = {"results": "web.hits", "title": "name", "link": "link", "text": "snippet", "query": "query"}
    assert await ask(service, **keys) == "N\nhttps://n.example/\nS"
    assert service.asked == [{"query": ["what"]}]


async def test_a_list_may_be_the_whole_answer_and_empty(service):
    service.answers = [answer([])]
    assert await ask(service, results="") == "no results"


@pytest.mark.parametrize(("header", "sent"), [("Authorization", "Bearer se-cret"), ("X-Subscription-Token", "se-cret")])
async def test_the_key_is_read_from_its_file(tmp_path, header, sent):
    key = tmp_path / "key"
    key.write_text("se-cret\n")
    settings = SearchSettings(url="http://host.example/", key_file=key, key_header=header)
    assert search._headers(settings)[header] == sent


async def test_results_are_read_outside_the_event_loop(service, monkeypatch):
    threads = []
    monkeypatch.setattr(search, "page_text", lambda text, _: threads.append(threading.get_ident()) or text)
    assert "Second" in await ask(service)
    assert threading.get_ident() not in threads


async def test_what_may_pass_is_asked_again(service):
    service.answers = [answer({}, 503), answer({}, 429)]
    assert "Second" in await ask(service)
    assert len(service.asked) == 3


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([answer({}, 503)] * 3, "answered HTTP 503"),
        ([answer({}, 401)], "answered HTTP 401"),
        ([(302, {"location": "http://127.0.0.1:1/"}, b"")], "answered HTTP 302"),
        ([answer({"error": "quota"})], "no list at 'results'"),
        ([(200, {}, b"<html>")], "no usable answer"),
        ([(200, {}, b"[" * 100_000)], "no usable answer"),
        ([(200, {}, b"[" + b" " * search.ANSWER_BYTES)], "longer than"),
    ],
)
async def test_a_service_that_fails_is_a_failure(service, answers, why):
    service.answers = list(answers)
    with pytest.raises(SearchFailedError, match=why) as caught:
        await ask(service)
    info = describe(caught.value)
    assert (info.code, info.boundary, info.retryable) == ("search_failed", "environment", True)
    assert len(service.asked) == len(answers)


async def test_a_service_that_is_not_there_is_a_failure(service):
    service.url = "http://127.0.0.1:1/"
    with pytest.raises(SearchFailedError, match=r"127\.0\.0\.1:1 gave no usable answer"):
        await ask(service)


async def test_a_missing_key_names_the_setting(service, tmp_path):
    with pytest.raises(SearchFailedError, match="key of the search service") as caught:
        await ask(service, key_file=tmp_path / "none")
    assert "key_file" in caught.value.hint


async def test_a_bad_query_goes_back_to_the_policy(service):
    service.answers = [answer({}, 422)]
    with pytest.raises(ToolInputError, match="does not take this query"):
        await ask(service)
    with pytest.raises(ToolInputError, match="query"):
        await ask(service, "x" * 1_001)


@pytest.mark.parametrize(
    "settings",
    [{"url": "ftp://host/"}, {"url": "http://user@host/"}, {"url": "http://h/", "key_file": "key"}],
)
def test_wrong_settings_are_refused(settings):
    with pytest.raises(ValidationError):
        SearchSettings(**settings)


def test_an_environment_names_both_the_tool_and_the_service():
    table = {"url": "http://search.example/api"}
    environment = Seeking(EnvironmentSpec(name="e", tools=["think", "search"], search=table))
    assert [tool["function"]["name"] for tool in environment.tool_definitions()] == ["think", "search"]
    assert environment.replayable == "never"
    assert environment.spec.model_dump(mode="json")["search"] == "search.example"
    for half in ({"tools": ["search"]}, {"search": table}):
        with pytest.raises(ConfigurationError, match="search") as caught:
            Seeking(EnvironmentSpec(name="e", **half))
        assert "Give both" in caught.value.hint


BROWSE = by_name(BUILTIN_TOOLS)["browse"]
PAGE = """<!DOCTYPE html><html><head><title>A &amp; B</title><style>p { color: red }</style></head><body>
<h1>Head</h1><p>One <b>bold</b>   word.</p><!-- <p>hidden</p> --><script>if (1 < 2) run("</p>")</script>
<ul><li>first</li><li><a href="/next?a=1&amp;b=2">second</a></li></ul>
<a href="javascript:go()">x</a> 1 < 2</body></html>"""


def pages(asked):
    match asked.path.split("?")[0]:
        case "/page":
            return 200, {"content-type": "text/html; charset=utf-8"}, PAGE.encode()
        case "/moved" | "/accent" as path:
            return 302, {"location": "/page" if path == "/moved" else "/é"}, b""
        case "/round":
            return 302, {"location": "/round"}, b""
        case "/latin":
            return 200, {"content-type": "text/plain; Charset=Latin-1"}, "é".encode("latin-1")
        case "/punycode" | "/idna" | "/%C3%A9" as path:
            return 200, {"content-type": f"text/plain; charset={path[1:]}"}, b"bcher-kva"
        case "/picture":
            return 200, {"content-type": "image/png"}, b"\x89PNG"
        case "/archive":
            return 200, {"content-type": "application/zip"}, b"PK"
        case "/long":
            return 200, {"content-type": "text/plain"}, "".join(f"{n:9}\n" for n in range(1000)).encode()
        case "/huge":
            return 200, {"content-type": "text/plain"}, b"x" * 3_000_000
    return 404, {"content-type": "text/plain"}, b"nothing here"


@pytest.fixture(scope="module")
def site():
    with web_server(pages) as address:
        yield f"http://{address}"


@pytest.fixture
def read(local_sandbox):
    async def call(url, output_chars=4_000, seconds=20.0, **arguments):
        result = await BROWSE({"url": url, **arguments}, ToolContext(local_sandbox, seconds, output_chars))
        return result.text

    return call


async def test_a_page_becomes_text_with_its_links(read, site):
    expected = f"# A & B\n\n# Head\n\nOne bold word.\n\n- first\n\n- second ({site}/next?a=1&b=2)\n\nx 1 < 2"
    assert await read(f"{site}/page") == expected
    assert await read(f"{site}/moved") == expected
    assert await read(f"{site}/latin") == "é"
    for path in ("é", "%C3%A9", "accent", "punycode", "idna"):
        assert await read(f"{site}/{path}") == "bcher-kva"
    assert await read(f"{site}/none") == "nothing here\n[HTTP 404]"


async def test_a_long_page_is_read_in_parts(read, site):
    first = await read(f"{site}/long", output_chars=1_000)
    assert len(first) <= 1_000
    assert first.endswith("[characters 0 to 800 of 10000; `start` shows others]")
    second = await read(f"{site}/long", output_chars=1_000, start=800)
    assert second.startswith(f"{80:9}\n")
    with pytest.raises(ToolInputError, match="has 10000 characters"):
        await read(f"{site}/long", start=10_000)
    assert f"[the page is larger than {browse.PAGE_BYTES} bytes" in await read(f"{site}/huge")


@pytest.mark.slow
async def test_what_cannot_be_read_is_explained(read, site):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            free = closed.getsockname()[1]
        for url, message in [
            (f"{site}/picture", "is an image; only text"),
            (f"{site}/archive", "application/zip; only text"),
            (f"{site}/round", "more than 5 redirects"),
            ("ftp://127.0.0.1/", "not an address such as"),
            ("file:///etc/passwd", "not an address such as"),
            ("http://", "not an address such as"),
            ("http://[::1", "cannot be fetched"),
            ("http://example.com/", "has no network, so example.com cannot be reached"),
            (f"http://127.0.0.1:{free}/", "refused"),
            (site.replace("http", "https"), "TLS failed"),
            (f"http://127.0.0.1:{silent.getsockname()[1]}/", "no answer in time"),
        ]:
            with pytest.raises(ToolInputError, match=message):
                await read(url, seconds=1.0 if "silent" in message or "time" in message else 20.0)


@given(st.text(alphabet="<>/!-ab\"'= &;\n", max_size=200))
def test_any_source_has_a_text(source):
    text = page_text(source, "http://a.example/")
    assert text == text.strip()
    assert "\n\n\n" not in text
    if "<" not in source and "&" not in source:
        assert text.split() == source.split()


@pytest.mark.parametrize(
    "source",
    [
        "<head><!-- c --><title>T</title></head><body>Seen",
        "<head><title>T</title><body>Seen",
        "<title>T</title>Seen<script>x = '<!-- c -->'; hidden()</script>",
        "<title>T</title><style>p {}<!-- c --> b {}</style>Seen<noscript><!-- c -->hidden</noscript>",
    ],
)
def test_a_comment_or_an_open_head_changes_nothing_of_what_is_seen(source):
    assert page_text(source, "http://a.example/") == "# T\n\nSeen"


def test_a_character_with_a_long_number_stays_as_it_is():
    number = "&#" + "1" * 5_000
    page = f"<head><title>{number}</title></head><p>{number}"
    assert page_text(page, "http://a.example/") == f"# {number}\n\n{number}"


@pytest.mark.slow
def test_a_hostile_page_costs_little():
    for piece in ("<", "<a href=", "<!--", "<title", "&", "<script>", " \t", "<a href='"):
        begun = time.process_time()
        page_text(piece * (browse.PAGE_BYTES // len(piece) // 8), "http://a.example/")
        assert time.process_time() - begun < 30, piece  # quadratic time would be many minutes
