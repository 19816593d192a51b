"""axe-core finds nothing serious on any page, in either color scheme, and dialogs can be used with keys alone."""

import pytest
from playwright.async_api import expect

from tests.support.browser import canned
from tests.support.browser.axe import violations
from tests.support.browser.watched_page import watched_page

pytestmark = pytest.mark.browser

PAGES = ["", "#/engines", "#/nodes", "#/hangs"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("address", PAGES)
async def test_axe_finds_nothing_serious(browser, fake, address, scheme):
    fake.answer("GET /v1/hangs", canned.hang_report())
    fake.answer("GET /v1/node", canned.concurrency())
    async with watched_page(browser, color_scheme=scheme) as (page, _):
        await page.goto(fake.url + address)
        await expect(page.get_by_role("status")).to_have_text("Live")
        await expect(page.get_by_role("heading", level=2).first).to_be_visible()
        assert await violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious_in_dialogs(browser, fake, scheme):
    async with watched_page(browser, color_scheme=scheme) as (page, _):
        await page.goto(fake.url + "#/engines")
        await page.get_by_role("button", name="Pause").click()
        await expect(page.get_by_role("dialog")).to_be_visible()
        assert await violations(page) == []
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
        assert await violations(page) == []


async def test_keys_lead_to_every_page(page, fake):
    fake.answer("GET /v1/hangs", canned.hang_report())
    fake.answer("GET /v1/node", canned.concurrency())
    await page.goto(fake.url)
    await expect(page.get_by_role("status")).to_have_text("Live")
    for key, heading in [("e", "Engines"), ("n", "Nodes"), ("h", "Hangs"), ("o", "Overview")]:
        await page.keyboard.press("g")
        await page.keyboard.press(key)
        await expect(page.get_by_role("heading", level=1)).to_have_text(heading)


async def test_a_dialog_is_answered_with_keys(page, fake):
    fake.answer("POST /v1/pause", {})
    await page.goto(fake.url + "#/engines")
    await expect(page.get_by_role("status")).to_have_text("Live")
    await expect(page.get_by_role("button", name="Pause")).to_be_enabled()
    await page.get_by_role("button", name="Pause").press("Enter")
    await expect(page.get_by_label("Requests end first")).to_be_visible()  # a press waits for no dialog
    await page.get_by_label("Requests end first").press("Space")
    await expect(page.get_by_label("Requests end first")).to_be_checked()
    async with page.expect_response("**/v1/pause"):
        await page.get_by_label("Requests end first").press("Enter")
    await expect(page.get_by_role("dialog")).to_have_count(0)
    assert ("POST", "/v1/pause", {"pool": "policy", "mode": "drain"}) in fake.requests


async def test_the_theme_is_kept(page, fake):
    await page.goto(fake.url)
    root = page.locator("html")
    await expect(root).to_have_attribute("data-theme", "light")
    await page.keyboard.press("t")
    await expect(root).to_have_attribute("data-theme", "dark")
    await page.reload()
    await expect(root).to_have_attribute("data-theme", "dark")
    await page.get_by_role("button", name="Theme").click()
    await expect(root).to_have_attribute("data-theme", "light")
