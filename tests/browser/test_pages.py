"""Every page loads, without an error and without asking another host."""

import pytest
from playwright.async_api import expect

from tests.support.browser import canned

pytestmark = pytest.mark.browser


@pytest.mark.parametrize(
    ("address", "heading"),
    [("", "Overview"), ("#/engines", "Engines"), ("#/nodes", "Nodes"), ("#/hangs", "Hangs")],
)
async def test_a_page_shows_what_the_overview_says(page, fake, address, heading):
    fake.answer("GET /v1/hangs", canned.hang_report())
    fake.answer("GET /v1/node", canned.concurrency())
    await page.goto(fake.url + address)
    await expect(page.get_by_role("heading", level=1)).to_have_text(heading)
    await expect(page.get_by_role("status")).to_have_text("Live")


async def test_the_page_follows_the_stream(page, fake):
    fake.answer("GET /v1/node", canned.concurrency())
    await page.goto(fake.url + "#/nodes")
    await expect(page.get_by_text("node-b", exact=True)).to_be_visible()
    fake.overview = fake.overview.model_copy(update={"nodes": fake.overview.nodes[:1]})
    await expect(page.get_by_text("node-b", exact=True)).to_have_count(0)
