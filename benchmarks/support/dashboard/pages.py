"""How fast the dashboard's page opens and follows a large service, in a real headless Chromium.

The service behind it has canned answers, so the figures are the browser's alone. `slow` is a processor four times as
slow, as the browser emulates it. The large service has 128 engines, 200 nodes and 5,000 workers in each stage.
"""

from __future__ import annotations

from typing import Any

import anyio
from playwright.async_api import Browser, Page, expect

from tests.support.browser import canned
from tests.support.browser.fake_service import FakeService, fake_service
from tests.support.browser.watched_page import chromium, watched_page

OBSERVE = """
window.measured = {lcp: 0, cls: 0, longest: 0};
const observe = (type, note) =>
  new PerformanceObserver((list) => list.getEntries().forEach(note)).observe({type, buffered: true});
observe("largest-contentful-paint", (entry) => (measured.lcp = entry.startTime));
observe("layout-shift", (entry) => (measured.cls += entry.value));
observe("longtask", (entry) => (measured.longest = Math.max(measured.longest, entry.duration)));
"""
KIB = """performance.getEntriesByType("resource").reduce((sum, entry) => sum + entry.transferSize, 0) / 1024"""
SHOWN_MS = 60_000
"""How long a page may take to be shown, with a slow processor on a busy machine."""
SETTLE_SECONDS = 1.5
UPDATES = 8
ENGINES, NODES, WORKERS = 128, 200, 5_000


async def measure(updates: int = UPDATES) -> dict[str, float]:
    """Return the figures by name: milliseconds, KiB, and the score of what moves while the page opens."""
    with fake_service() as fake:
        fake.answer("GET /v1/hangs", canned.hang_report())
        fake.answer("GET /v1/node", canned.concurrency())
        async with chromium() as browser:
            await _opened(browser, fake, slowness=1)  # the first page of a browser starts its processes
            quick = await _opened(browser, fake, slowness=1)
            slow = await _opened(browser, fake, slowness=4)
            _grow(fake)
            pages = ("", "#/engines", "#/nodes")
            longest = [await _followed(browser, fake, page, updates) for page in pages]
    return {
        "page_lcp_ms": quick["lcp"],
        "page_lcp_slow_ms": slow["lcp"],
        "page_shift": slow["cls"],
        "page_kib": quick["kib"],
        "page_large_update_ms": max(longest),
    }


async def _opened(browser: Browser, fake: FakeService, *, slowness: int) -> dict[str, float]:
    """Open the overview and return what the browser measured."""
    async with watched_page(browser) as (page, _):
        await page.add_init_script(OBSERVE)
        devtools = await page.context.new_cdp_session(page)
        await devtools.send("Emulation.setCPUThrottlingRate", {"rate": slowness})
        await _shown(page, fake.url)
        found: dict[str, Any] = await page.evaluate("measured")
        return {"lcp": found["lcp"], "cls": found["cls"], "kib": await page.evaluate(KIB)}


async def _shown(page: Page, url: str) -> None:
    await page.goto(url)
    await expect(page.get_by_role("heading", level=2).first).to_be_visible(timeout=SHOWN_MS)
    await anyio.sleep(SETTLE_SECONDS)


def _grow(fake: FakeService) -> None:
    many = {"workers": WORKERS, "working": WORKERS - 1_000}
    fake.overview = fake.overview.model_copy(
        update={
            "stages": [stage.model_copy(update=many) for stage in fake.overview.stages],
            "backends": [canned.backend(number) for number in range(1, ENGINES + 1)],
            "nodes": [canned.node(f"node-{number}") for number in range(NODES)],
        }
    )


async def _followed(browser: Browser, fake: FakeService, address: str, updates: int) -> float:
    """Return the longest task, in milliseconds, while a page follows updates; tasks below 50 ms count as 0."""
    async with watched_page(browser) as (page, _):
        await page.add_init_script(OBSERVE)
        await _shown(page, fake.url + address)
        await page.evaluate("measured.longest = 0")
        for number in range(updates):
            fake.overview = fake.overview.model_copy(update={"finished_per_second": number + 0.5})
            await anyio.sleep(0.3)
        longest: float = await page.evaluate("measured.longest")
        return longest
