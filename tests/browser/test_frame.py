"""The frame of the page: keys and roles, lost connections, prefixes, hostile text, and screens of different sizes."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
import pytest
from playwright.async_api import Page, expect
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from api_schemas.nodes import NodeState
from rollout_service.http.keyring import Role
from tests.support.browser import canned
from tests.support.browser.fake_service import FakeService, served
from tests.support.waiting import until

pytestmark = pytest.mark.browser

RIGHT, READ = "a-key-of-the-administrator", "a-key-that-may-only-read"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>\u202e\x1b[31m<svg/onload=alert(3)>"


@pytest.fixture
def keyed(fake: FakeService) -> FakeService:
    fake.keys = {RIGHT: Role.ADMIN, READ: Role.READ}
    return fake


async def use_key(page: Page, key: str) -> None:
    await page.get_by_label("Key", exact=True).fill(key)
    await page.keyboard.press("Enter")


async def test_a_key_is_asked_for_and_kept_in_the_tab(page, notes, keyed):
    notes.expected_statuses = {401}
    await page.goto(keyed.url + "#/engines")
    await expect(page.get_by_role("dialog")).to_contain_text("needs a key")
    assert await page.get_by_text("10.0.0.1").count() == 0
    await use_key(page, "a-wrong-key-of-some-length")
    await expect(page.get_by_role("dialog")).to_contain_text("The key is wrong")
    await use_key(page, RIGHT)
    await expect(page.get_by_text("10.0.0.1")).to_be_visible()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    await expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    await page.reload()
    await expect(page.get_by_text("10.0.0.1")).to_be_visible()
    assert RIGHT not in page.url
    assert not any(RIGHT in path for _, path, _ in keyed.requests), "a key in an address ends up in logs"


async def test_a_key_that_may_only_read_disables_what_changes_something(page, notes, keyed):
    notes.expected_statuses = {401}
    keyed.answer("GET /v1/node", canned.concurrency())
    await page.goto(keyed.url + "#/engines")
    await use_key(page, READ)
    for name in ("Abort all rollouts", "Pause"):
        button = page.get_by_role("button", name=name)
        await expect(button).to_be_disabled()
        await expect(button).to_have_attribute("title", "Your key may not do this: it needs the role admin")
    await expect(page.get_by_role("button", name="Drain")).to_have_count(3)
    await page.goto(keyed.url + "#/nodes")
    await expect(page.get_by_label("Workers of rollout")).to_be_disabled()


async def test_a_lost_connection_is_said_and_comes_back(page, notes, fake):
    notes.expected_statuses = {503}
    await page.goto(fake.url)
    await expect(page.get_by_role("status")).to_have_text("Live")
    fake.broken = True
    await expect(page.get_by_text("The connection to the service is lost")).to_be_visible()
    fake.broken = False
    fake.overview = fake.overview.model_copy(update={"finished_per_second": 9.87})
    await expect(page.get_by_text("9.87")).to_be_visible()
    await expect(page.get_by_text("The connection to the service is lost")).to_have_count(0)


async def test_a_hidden_tab_gives_its_connection_back(page, fake):
    """A browser has six connections for each server, so tabs that nobody looks at must not hold them."""
    await page.clock.install()
    await page.goto(fake.url)
    await expect(page.get_by_role("status")).to_have_text("Live")
    assert fake.readers == 1
    hide = """(hidden) => {
      Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    await page.evaluate(hide, True)
    await page.clock.run_for(6_000)
    await until(lambda: fake.readers == 0)
    fake.overview = fake.overview.model_copy(update={"finished_per_second": 7.65})
    await page.evaluate(hide, False)
    await page.clock.run_for(1_000)
    await expect(page.get_by_text("7.65")).to_be_visible()
    assert fake.readers == 1


HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


@contextmanager
def prefix_proxy(target: str, prefix: str) -> Iterator[str]:
    """Serve `target` below a prefix, which the proxy takes away; yield the address of the page.

    Nothing is served outside the prefix, so a page that asks for an absolute path fails.
    """

    async def forward(request: Request) -> Response:
        path = request.url.path.removeprefix(prefix)
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP]
        opened = httpx.AsyncClient(base_url=target, timeout=None)
        sent = opened.build_request(
            request.method,
            httpx.URL(path, query=request.url.query.encode()),
            headers=headers,
            content=await request.body(),
        )
        answer = await opened.send(sent, stream=True)

        async def body() -> AsyncIterator[bytes]:
            async for piece in answer.aiter_raw():
                yield piece

        async def close() -> None:
            await answer.aclose()
            await opened.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
        return StreamingResponse(body(), answer.status_code, kept, background=BackgroundTask(close))

    with served(Starlette(routes=[Route(prefix + "/{path:path}", forward, methods=METHODS)])) as url:
        yield url.rstrip("/") + prefix + "/"


@pytest.mark.parametrize("prefix", ["/proxy/8080", "/rnode/host-1.cluster/8080", "/a b/ü"])
async def test_the_page_works_below_any_prefix(page, fake, prefix):
    fake.answer("GET /v1/node", canned.concurrency())
    with prefix_proxy(fake.url, prefix) as url:
        await page.goto(url + "#/nodes")
        await expect(page.get_by_role("status")).to_have_text("Live")
        await expect(page.get_by_label("Workers of rollout")).to_have_value("64")
        await page.keyboard.press("g")
        await page.keyboard.press("o")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
        await page.goto("about:blank")  # its stream must end before the proxy does


async def test_an_order_is_sent_once_it_is_confirmed(page, fake):
    fake.answer("POST /v1/backends/b1/drain", canned.backend(1).backend)
    await page.goto(fake.url + "#/engines")
    engine = page.get_by_role("region", name="http://10.0.0.1:30000")
    await engine.get_by_role("button", name="Drain").click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name="Back").click()
    await expect(dialog).to_have_count(0)
    assert not [one for one in fake.requests if one[0] == "POST"]
    await engine.get_by_role("button", name="Drain").click()
    await dialog.get_by_role("button", name="Drain").click()
    await expect(dialog).to_have_count(0)
    assert ("POST", "/v1/backends/b1/drain", None) in fake.requests


async def test_what_was_asked_is_what_is_confirmed(page, fake):
    fake.answer("GET /v1/node", canned.concurrency())
    fake.answer("POST /v1/nodes/node-a/drain", canned.node("node-a", state=NodeState.DRAINING))
    await page.goto(fake.url + "#/nodes")
    await page.get_by_role("region", name="node-a").get_by_role("button", name="Drain").click()
    dialog = page.get_by_role("dialog", name="Drain node-a?")
    await expect(dialog).to_contain_text("ends its")
    # Someone else drains the node meanwhile, and the page offers the opposite in the same place.
    drained = [canned.node("node-a", state=NodeState.DRAINING), *fake.overview.nodes[1:]]
    fake.overview = fake.overview.model_copy(update={"nodes": drained})
    resume = page.get_by_role("button", name="Resume")
    await expect(resume).to_have_count(1)
    await expect(dialog).to_contain_text("ends its")
    await dialog.get_by_role("button", name="Drain").click()
    await expect(dialog).to_have_count(0)
    assert [path for method, path, _ in fake.requests if method == "POST"] == ["/v1/nodes/node-a/drain"]
    await resume.click()
    await expect(page.get_by_role("dialog", name="Resume node-a?")).to_contain_text("begins rollouts again")


async def test_an_order_that_is_refused_says_why(page, notes, fake):
    notes.expected_statuses = {404}
    await page.goto(fake.url + "#/engines")
    await page.get_by_role("button", name="Abort all rollouts").click()
    await page.get_by_role("dialog").get_by_role("button", name="Abort all rollouts").click()
    await expect(page.get_by_role("dialog").get_by_role("alert")).to_contain_text("not_found")


async def test_concurrency_is_changed_by_what_was_typed_alone(page, fake):
    fake.answer("GET /v1/node", canned.concurrency())
    fake.answer("PATCH /v1/node", canned.concurrency())
    await page.goto(fake.url + "#/nodes")
    await page.get_by_label("Workers of rollout").fill("96")
    await page.get_by_role("button", name="Change").click()
    await expect(page.get_by_role("button", name="Change")).to_be_disabled()
    assert ("PATCH", "/v1/node", {"rollout": {"workers": 96}}) in fake.requests


async def test_what_a_rollout_does_is_shown_where_it_hangs(page, fake):
    fake.answer("GET /v1/hangs", canned.hang_report())
    fake.answer("GET /v1/rollouts/r-stuck-0/activity", canned.activity())
    await page.goto(fake.url + "#/hangs")
    stuck = page.get_by_role("region", name="14 rollouts wait")
    await expect(stuck).to_contain_text("usually 1.9 s")
    await expect(stuck).to_contain_text("does not answer")
    await expect(stuck).to_contain_text("stage_runner.py:118")
    await expect(stuck.get_by_text("Event.wait")).to_have_count(0)
    await stuck.get_by_role("button", name="frame of libraries").click()
    await expect(stuck.get_by_text("Event.wait")).to_be_visible()
    await stuck.get_by_role("button", name="What r-stuck-0 does").click()
    await expect(stuck).to_contain_text("attempt 1 at node-a")


async def test_hostile_text_stays_text(page, fake):
    errors = [one.model_copy(update={"message": HOSTILE, "hint": HOSTILE}) for one in canned.errors()]
    finding = canned.finding().model_copy(update={"message": HOSTILE, "subject": HOSTILE})
    changes = {"errors": errors, "findings": [finding], "warnings": [HOSTILE]}
    fake.overview = fake.overview.model_copy(update=changes)
    await page.goto(fake.url)
    await expect(page.get_by_text("<img src=x onerror=alert(1)>").first).to_be_visible()
    await expect(page.locator(".mark", has_text="RLO").first).to_be_visible()
    await expect(page.locator("main img, main script")).to_have_count(0)
    assert "\u202e" not in await page.locator("main").inner_text()


@pytest.mark.parametrize("width", [1280, 900, 480])
async def test_nothing_is_wider_than_the_screen(page, fake, width):
    fake.answer("GET /v1/hangs", canned.hang_report())
    fake.answer("GET /v1/node", canned.concurrency())
    await page.set_viewport_size({"width": width, "height": 800})
    for address in ("", "#/engines", "#/nodes", "#/hangs"):
        await page.goto(fake.url + address)
        await expect(page.get_by_role("heading", level=2).first).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width, address


async def test_an_idle_service_has_words_instead_of_empty_tables(page, fake):
    idle = {"working": 0, "waiting": 0, "waits_for": {}, "oldest_seconds": 0.0}
    changes = {
        "stages": [stage.model_copy(update=idle) for stage in fake.overview.stages],
        "errors": [],
        "findings": [],
        "outcomes": {},
        "success_share": None,
        "backends": [],
        "runs": [],
        "counts": {},
        "bottleneck": None,
        "reasons": ["the pool `policy` has no engine in service; register one"],
    }
    fake.overview = fake.overview.model_copy(update=changes)
    await page.goto(fake.url)
    for text in ("None of late.", "Nothing ended.", "No engine is registered", "No run is in progress."):
        await expect(page.get_by_text(text)).to_be_visible()
    await expect(page.get_by_text("Takes no work:")).to_be_visible()
    await expect(page.get_by_text("Bottleneck:")).to_have_count(0)


async def test_what_limits_the_throughput_is_said_with_what_would_change_it(page, fake):
    await page.goto(fake.url)
    limit = page.get_by_text("Bottleneck: engines.").locator("..")
    await expect(limit).to_contain_text("73% of them wait for engines")
    await expect(limit).to_contain_text("Add engines.")
    await expect(limit).to_contain_text("One more node would bring nothing: the engines are full")


async def test_a_page_that_does_not_exist_says_so(page, fake):
    await page.goto(fake.url + "#/nothing/here")
    await expect(page.get_by_text("There is no page /nothing/here")).to_be_visible()
