"""`browse` reads pages through a sandbox, bounds them, and explains what it cannot read."""

import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.agents.tool_calling.builtin_tools import BUILTIN_TOOLS
from rollout_service.agents.tool_calling.tools import ToolContext, by_name
from rollout_service.agents.turns import ToolInputError
from rollout_service.agents.web import browse
from rollout_service.agents.web.page_text import page_text
from tests.support.web_server import web_server

BROWSE = by_name(BUILTIN_TOOLS)["browse"]
PAGE = """<!DOCTYPE html><html><head><title>A &amp; B</title><style>p { color: red }</style></head><body>
<h1>Head</h1><p>One <b>bold</b>   word.</p><!-- <p>hidden</p> --><script>if (1 < 2) run("</p>")</script>
<ul><li>first</li><li><a href="/next?a=1&amp;b=2">second</a></li></ul>
<a href="javascript:go()">x</a> 1 < 2</body></html>"""


def pages(path, body):
    match path.split("?")[0]:
        case "/page":
            return 200, {"content-type": "text/html; charset=utf-8"}, PAGE.encode()
        case "/moved":
            return 302, {"location": "/page"}, b""
        case "/round":
            return 302, {"location": "/round"}, b""
        case "/latin":
            return 200, {"content-type": "text/plain; charset=latin-1"}, "é".encode("latin-1")
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


@pytest.mark.slow
def test_a_hostile_page_costs_little():
    for piece in ("<", "<a href=", "<!--", "<title", "&", "<script>", " \t", "<a href='"):
        begun = time.process_time()
        page_text(piece * (browse.PAGE_BYTES // len(piece) // 8), "http://a.example/")
        assert time.process_time() - begun < 30, piece  # quadratic time would be many minutes
