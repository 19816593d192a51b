"""The page of a service with keys and a prefix: nothing is shown without a key, and one of `read` changes nothing."""

from collections.abc import Iterator

import pytest
from playwright.async_api import Page, expect

from tests.support.browser.prefix_proxy import prefix_proxy
from tests.support.processes.service import Running, scripted_engine, service

pytestmark = pytest.mark.browser

ADMIN, READ = "the-key-of-the-administrator", "the-key-that-may-only-read"
PREFIX = "/node/host-1.cluster/8080"
CONFIG = f"""
path_prefix = "{PREFIX}"
keys = [
  {{name = "admin", key = "{ADMIN}"}},
  {{name = "reader", role = "read", key = "{READ}"}},
]
"""
PATIENCE = 60_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("service")
    with scripted_engine(folder, delay=0.1) as engine, service(folder, engine.url, CONFIG) as started:
        yield started


async def use_key(page: Page, key: str) -> None:
    await page.get_by_label("Key", exact=True).fill(key)
    await page.keyboard.press("Enter")


async def test_a_key_that_may_only_read_looks_at_everything_and_changes_nothing(page, notes, server):
    notes.expected_statuses = {401}
    await page.goto(f"{server.url}/#/engines")
    await use_key(page, READ)
    await expect(page.get_by_role("button", name="Pause")).to_be_disabled(timeout=PATIENCE)
    await expect(page.get_by_role("button", name="Drain")).to_be_disabled()
    notes.expected_statuses.add(403)
    refused = await page.evaluate(
        """(key) => fetch("v1/pause", {method: "POST", body: "{}",
             headers: {"Content-Type": "application/json", "X-Rollout-Key": key}}).then((answer) => answer.status)""",
        READ,
    )
    assert refused == 403
    for address, heading in [("", "Overview"), ("#/nodes", "Nodes"), ("#/rollouts", "Rollouts")]:
        await page.goto(f"{server.url}/{address}")
        await expect(page.get_by_role("heading", level=1)).to_have_text(heading)
    await expect(page.locator(".dot")).to_have_text("Live")


@pytest.mark.parametrize("strip", [True, False], ids=["taken away", "passed on"])
async def test_a_proxy_may_keep_or_take_away_the_prefix(page, notes, server, strip):
    notes.expected_statuses = {401}
    with prefix_proxy(server.url, PREFIX, strip=strip) as url:
        await page.goto(f"{url}#/nodes")
        await use_key(page, ADMIN)
        await expect(page.get_by_label("Workers of init")).to_be_visible(timeout=PATIENCE)
        await expect(page.locator(".dot")).to_have_text("Live")
        await page.goto("about:blank")  # its stream must end before the proxy does
