"""The documentation works in a browser that reaches no other host: the service's own page, and the site."""

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import expect

from rollout_service.cli.server_child import running_server

pytestmark = [pytest.mark.browser, pytest.mark.slow(seconds=75)]
ROOT = Path(__file__).parents[2]


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Build the site, and yield the address where it is served."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "docs_site", "-o", str(folder)]
    paths = f"{ROOT}:{ROOT / 'packaging'}"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": paths})
    assert done.returncode == 0, done.stdout + done.stderr
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


async def test_the_page_of_the_api_shows_every_route_offline(page, tmp_path):
    async with running_server(tmp_path, ["--sandbox", "local", "--model", "calc-tuned"]) as client:
        await page.goto(f"{client.base_url}/docs")
        await expect(page.get_by_role("heading", name="Rollout service")).to_be_visible()
        await expect(page.get_by_text("/v1/rollouts/{rollout_id}/trajectory")).to_be_visible()


async def test_a_page_of_the_site_is_found_by_its_search(page, site):
    await page.goto(f"{site}index.html")
    await page.get_by_role("button", name="Search").or_(page.get_by_role("combobox")).first.click()
    await page.keyboard.type("staleness")
    await expect(page.get_by_role("link", name="staleness").first).to_be_visible()


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("reference/commands.html", "rollout-service doctor"),
        ("reference/openapi.html", "GET /v1/rollouts"),
        ("reference/openapi/browse.html", "/v1/rollouts/{rollout_id}/trajectory"),
        ("reference/python/client.html", "RolloutClient"),
        ("architecture.html", "The life of a rollout"),
    ],
)
async def test_generated_pages_have_what_they_are_made_from(page, site, address, text):
    await page.goto(site + address)
    await expect(page.locator("article, #swagger-ui").get_by_text(text).first).to_be_visible()
