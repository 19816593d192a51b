"""The page of a run of a real service: it fills as rollouts end, and its buttons do what the key allows."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.async_api import Page, expect

from tests.support.processes.service import scripted_engine, service

pytestmark = pytest.mark.browser

KEYS = {role: f"a-key-of-the-role-{role}" for role in ("read", "submit", "admin")}
CONFIG = "\n".join(f'[[keys]]\nname = "{role}"\nrole = "{role}"\nkey = "{key}"' for role, key in KEYS.items())


class Api:
    """A real service with keys, and a client that may do everything."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {KEYS['admin']}"})

    def make_run(self, name: str, tasks: int) -> None:
        source = {
            "kind": "inline",
            "tasks": [{"environment": "echo", "instance": {"number": number}} for number in range(tasks)],
            "open": True,
        }
        run = {"run_id": name, "group_size": 2, "batch_size": 2, "filters": [], "source": source}
        assert self.client.post("/v1/runs", json=run).is_success

    def state(self, name: str) -> Any:
        return self.client.get(f"/v1/runs/{name}").json()["state"]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("runs")
    with scripted_engine(folder, delay=0.01) as engine, service(folder, engine.url, CONFIG) as running:
        api = Api(running.url)
        with api.client:
            yield api


async def open_run(page: Page, api: Api, name: str, role: str) -> None:
    await page.add_init_script(f"sessionStorage.setItem('rollout-key', '{KEYS[role]}')")
    await page.goto(f"{api.url}/#/runs/{name}")
    await expect(page.get_by_role("heading", level=1)).to_have_text(name)
    await expect(page.get_by_role("status")).to_have_text("Live")


async def test_a_run_fills_while_one_looks_at_it(page, api):
    page.set_default_timeout(60_000)
    api.make_run("grows", 0)
    await open_run(page, api, "grows", "read")
    await expect(page.get_by_text("No group has closed yet.")).to_be_visible()
    more = [{"environment": "echo", "instance": {"number": number}} for number in range(3)]
    assert api.client.post("/v1/runs/grows/tasks", json={"tasks": more}).is_success
    await expect(page.locator(".plot canvas")).to_have_count(6, timeout=60_000)
    rows = page.get_by_role("list", name="Groups, the newest first").get_by_role("listitem")
    await expect(rows).to_have_count(3, timeout=60_000)
    await expect(rows.first.get_by_role("link", name="Sample 0: completed, reward 1")).to_be_visible(timeout=60_000)
    await expect(page.locator(".run-states a").nth(1)).to_have_text("3 ready", timeout=60_000)
    assert api.client.get("/v1/runs/grows").json()["counts"]["ready"] == 3


async def test_a_run_is_paused_resumed_and_ended_with_a_key_that_may_submit(page, api):
    api.make_run("steered", 1)
    await open_run(page, api, "steered", "submit")
    for button, state in (("Pause", "paused"), ("Resume", "running"), ("End", "ended")):
        await page.get_by_role("button", name=button).click()
        await page.get_by_role("dialog").get_by_role("button", name=button).click()
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await expect(page.locator(".run-title .badge")).to_have_text(state)
        assert api.state("steered") == state
    await expect(page.get_by_role("button", name="Pause")).to_have_count(0)
