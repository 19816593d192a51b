"""The page with a real service behind it: what rollouts do is seen while they do it, and orders are carried out."""

import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from playwright.async_api import Locator, Page, expect

from tests.support.browser.watched_page import watched_page
from tests.support.processes.service import Running, eventually, scripted_engine, service

pytestmark = pytest.mark.browser

PATIENCE = 60_000


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with scripted_engine(tmp_path_factory.mktemp("engine"), delay=0.3) as started:
        yield started


@pytest.fixture(scope="module")
def server(engine: Running, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with service(tmp_path_factory.mktemp("service"), engine.url, turns=3) as started:
        eventually(lambda: httpx.get(f"{started.url}/ready").is_success, started)  # its engine is in service then
        yield started


@pytest.fixture
async def http(server: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        yield client


async def post(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    (await http.post(path, json=body)).raise_for_status()


async def submit(http: httpx.AsyncClient, count: int) -> None:
    for number in range(count):
        await post(http, "/v1/rollouts", {"task": {"environment": "echo", "instance": {"number": number}}})


def figure(page: Page, name: str) -> Locator:
    return page.locator(".figures > div", has_text=name).locator(".value")


async def test_rollouts_are_seen_while_they_run_and_when_they_end(page, server, http):
    await page.goto(server.url)
    await expect(page.get_by_text("Live", exact=True)).to_be_visible()
    before = int(await figure(page, "Completed").inner_text())
    await submit(http, 5)
    at_work = page.get_by_role("region", name="rollout", exact=True).locator(".slot:not(.free)")
    await expect(at_work.first).to_be_visible(timeout=PATIENCE)
    await expect(figure(page, "Completed")).to_have_text(str(before + 5), timeout=PATIENCE)
    await expect(figure(page, "Under way")).to_have_text("0", timeout=PATIENCE)
    await expect(page.get_by_role("row", name="completed")).to_be_visible()


async def order(page: Page, label: str) -> None:
    """Press the button, and confirm what it asks."""
    await page.get_by_role("button", name=label).click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("button", name=label).click()
    await expect(dialog).to_have_count(0, timeout=PATIENCE)


async def test_a_pool_is_paused_and_resumed(page, server, http):
    await page.goto(f"{server.url}/#/engines")
    try:
        await order(page, "Pause")
        await expect(page.get_by_role("button", name="Resume")).to_be_visible(timeout=PATIENCE)
        await expect(page.get_by_text("paused").first).to_be_visible()
        await order(page, "Resume")
        await expect(page.get_by_role("button", name="Pause")).to_be_visible(timeout=PATIENCE)
    finally:
        await post(http, "/v1/resume", {})


async def test_an_engine_is_drained_and_put_back(page, server, http):
    await page.goto(f"{server.url}/#/engines")
    engine = (await http.get("/v1/backends")).json()[0]
    try:
        await order(page, "Drain")
        await expect(page.get_by_role("button", name="Put back")).to_be_visible(timeout=PATIENCE)
        await order(page, "Put back")
        await expect(page.get_by_role("button", name="Drain")).to_be_visible(timeout=PATIENCE)
        assert (await http.get("/v1/backends")).json()[0]["state"] == "ready"
    finally:
        if (await http.get("/v1/backends")).json()[0]["state"] != "ready":
            await post(http, "/v1/backends", {"url": engine["url"], "pool": engine["pool"]})


async def test_a_node_is_drained_and_resumed_and_its_concurrency_changed(page, server, http):
    await page.goto(f"{server.url}/#/nodes")
    try:
        await order(page, "Drain")
        await expect(page.get_by_role("button", name="Resume")).to_be_visible(timeout=PATIENCE)
        await order(page, "Resume")
        await expect(page.get_by_role("button", name="Drain")).to_be_visible(timeout=PATIENCE)
    finally:
        node = (await http.get("/v1/nodes")).json()[0]["node"]
        await post(http, f"/v1/nodes/{node}/resume", {})
    await page.get_by_label("Workers of evaluate").fill("7")
    await page.get_by_role("button", name="Change").click()
    await expect(page.get_by_role("button", name="Change")).to_be_disabled(timeout=PATIENCE)
    assert (await http.get("/v1/node")).json()["evaluate"]["workers"] == 7
    await expect(page.get_by_label("Workers of evaluate")).to_have_value("7")


async def test_all_rollouts_are_aborted_at_once(page, server, http):
    await post(http, "/v1/pause", {})
    try:
        await submit(http, 3)
        await page.goto(f"{server.url}/#/engines")
        abort = page.get_by_role("button", name="Abort all rollouts")
        await expect(abort).to_be_enabled(timeout=PATIENCE)
        await abort.click()
        await page.get_by_role("dialog").get_by_role("button", name="Abort all rollouts").click()
        await expect(page.get_by_role("dialog")).to_have_count(0, timeout=PATIENCE)
        await expect(abort).to_be_disabled(timeout=PATIENCE)
    finally:
        await post(http, "/v1/resume", {})


async def test_an_engine_that_hangs_is_named_with_its_rollouts(page, engine, server, http):
    await page.goto(server.url)
    await expect(page.get_by_text("Live", exact=True)).to_be_visible()
    engine.stop(signal.SIGSTOP)
    try:
        await submit(http, 2)
        banner = page.get_by_role("alert")
        await expect(banner).to_contain_text("stuck", timeout=PATIENCE)
        await banner.get_by_role("link", name="What hangs").click()
        # On a busy machine, the event loop may be a finding of its own.
        finding = page.locator(".finding", has_text="engine in rollout")
        await expect(finding.locator(".waiting a")).to_have_count(2, timeout=PATIENCE)
        await expect(finding).to_contain_text("Where it waits")
        await finding.get_by_role("button", name="What").first.click()
        await expect(finding).to_contain_text("attempt 1")
    finally:
        engine.stop(signal.SIGCONT)
    await expect(page.get_by_text("Nothing takes longer than its history says.")).to_be_visible(timeout=PATIENCE)
    await expect(page.get_by_role("alert")).to_have_count(0)


async def test_a_rollout_is_saved_and_looked_at_from_the_file(page, browser, server, http, tmp_path):
    request = {"task": {"environment": "echo", "instance": {"number": 7}}, "rollout_id": "saved"}
    ended = await http.post("/v1/rollouts?wait=60", json=request)
    assert ended.json()["state"] == "completed"
    await page.goto(f"{server.url}/#/rollouts/saved")
    async with page.expect_download() as started:
        await page.get_by_role("button", name="Save as HTML").click()
    file = tmp_path / "saved.html"
    await (await started.value).save_as(file)
    async with watched_page(browser) as (saved, _):
        await saved.goto(file.as_uri())
        await expect(saved.locator(".conversation")).to_contain_text("Say 7.")
        await expect(saved.locator(".tl-bar.tone-engine").first).to_be_visible()
        await saved.get_by_role("tab", name="Tokens").click()
        await expect(saved.locator(".t.m").first).to_be_visible()
        await saved.get_by_role("tab", name="Sub-agents").click()
        await expect(saved.locator(".trajectory")).to_contain_text("started no sub-agents")
