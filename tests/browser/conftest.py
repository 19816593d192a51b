"""Fixtures of tests in a real headless Chromium, which reaches no host but this machine.

`page` is a page of Playwright's async API. When a test ends, it fails for script errors, messages in the console,
requests that failed or went elsewhere, and violations of the content security policy. `notes` lets a test say which of
them it expects.
"""

from collections.abc import AsyncIterator, Iterator

import pytest
from playwright.async_api import Browser, Page, expect

from tests.support.browser.fake_service import FakeService, fake_service
from tests.support.browser.watched_page import Notes, chromium, watched_page

expect.set_options(timeout=20_000)  # a page may take seconds on a machine that is busy with other tests


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def browser(anyio_backend: str) -> AsyncIterator[Browser]:
    async with chromium() as started:
        yield started


@pytest.fixture
async def watched(browser: Browser) -> AsyncIterator[tuple[Page, Notes]]:
    async with watched_page(browser) as found:
        yield found


@pytest.fixture
def page(watched: tuple[Page, Notes]) -> Page:
    return watched[0]


@pytest.fixture
def notes(watched: tuple[Page, Notes]) -> Notes:
    return watched[1]


@pytest.fixture(autouse=True)
def fake() -> Iterator[FakeService]:
    """Serve the page with the answers of `tests/support/browser/canned.py`; a test may change them.

    It is used by all, so that it is made before a page, and ends after it.
    """
    with fake_service() as service:
        yield service
