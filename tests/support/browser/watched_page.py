"""A page of a real browser that notices what must not happen: errors, refused scripts, requests to other hosts."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from playwright.async_api import Browser, Page, async_playwright

AIR_GAPPED = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"
CHROMIUM = shutil.which("chromium-headless-shell")
NOTE_VIOLATIONS = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) =>
  window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`));
"""
LEFT = ("net::ERR_ABORTED",)
"""How a request ends that the page itself gave up, such as a stream when the page is left."""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Start a browser that resolves no name.

    Raises:
        FileNotFoundError: There is no Chromium.
    """
    if CHROMIUM is None:
        raise FileNotFoundError("there is no chromium-headless-shell; ./scripts/test installs it")
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=[AIR_GAPPED])
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Notes:
    """What a page did that it must not do."""

    expected_statuses: set[int] = field(default_factory=set)
    """The statuses of failed requests that a test is about; the browser reports each to its console."""
    expected_failures: bool = False
    """Whether connections may break, as when a test stops its server."""
    problems: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)

    def watch(self, page: Page) -> None:
        """Listen to everything that the page reports."""
        page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        page.on("console", self._note_console)
        page.on("requestfailed", self._note_failure)
        page.on("request", self._note_host)

    def _note_host(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "about", "blob"):
            self.hosts.add(parts.netloc)

    def _note_console(self, message: Any) -> None:
        if message.type in ("error", "warning") and not self._is_expected(message.text):
            self.problems.append(f"console: {message.text}")

    def _is_expected(self, text: str) -> bool:
        if "Failed to load resource" not in text:
            return False
        return self.expected_failures or any(str(status) in text for status in self.expected_statuses)

    def _note_failure(self, request: Any) -> None:
        if request.failure not in LEFT and not self.expected_failures:
            self.problems.append(f"failed: {request.url} {request.failure}")

    async def check(self, page: Page) -> None:
        """Fail if anything was noted."""
        self.problems += [f"policy: {one}" for one in await page.evaluate("window.violations ?? []")]
        assert not self.problems
        assert len(self.hosts) <= 1, self.hosts


@asynccontextmanager
async def watched_page(browser: Browser, **options: Any) -> AsyncIterator[tuple[Page, Notes]]:
    """Open a page of 1280x800 in a context of its own, and check at the end that nothing went wrong in it."""
    settings: dict[str, Any] = {
        "viewport": {"width": 1280, "height": 800},
        "reduced_motion": "reduce",
        "locale": "en-US",
        "timezone_id": "UTC",
    }
    context = await browser.new_context(**settings | options)
    try:
        await context.add_init_script(NOTE_VIOLATIONS)
        page = await context.new_page()
        page.set_default_timeout(15_000)
        notes = Notes()
        notes.watch(page)
        yield page, notes
        await notes.check(page)
    finally:
        await context.close()
