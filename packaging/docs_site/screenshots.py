"""Take the pictures of the page, and of a trace in Perfetto, for the documentation, from a real service at work.

  scripts/screenshots           write them to docs/pictures/dashboard/
  scripts/screenshots -o DIR    write them elsewhere

Guarantee: what the pictures show happened: a service with the embedded engine rolls out two runs in sandboxes while a
trainer takes their batches, and one environment whose grader fails makes errors.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
from playwright.async_api import Page, async_playwright

from api_schemas.rollouts import RolloutRequest
from api_schemas.runs import Advantages, DatasetTasks, RunRequest
from api_schemas.sessions import SessionRequest
from api_schemas.tasks import Task
from docs_site.perfetto import perfetto_page
from rollout_client.client import RolloutClient
from rollout_service.cli.server_child import running_server
from rollout_service.cli.trace import write_trace
from rollout_service.engines.shipped import policy_folder

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = ("chromium-headless-shell", "chromium", "google-chrome")
SIZE = {"width": 1280, "height": 800}
BATCHES, BETTER_FROM, LONGEST_SECONDS = 10, 4, 150.0
POLL_SECONDS = 5.0
SETTLE_SECONDS = 1.5
"""What plots and streams get to draw, which is for people and decides nothing."""
BEFORE_SECONDS, AFTER_SECONDS = 0.7, 2.7
"""The time around an update of weights that the picture of a trace shows."""
SHORTEN = """
(root) => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode())
    if (node.data.includes(root)) node.data = node.data.replace(root, "");
}
"""
"""Leaves the folder of this checkout out of paths that the page shows."""
BROKEN = """\
name = "broken-grader"
prompt = "{{ instance.question }}"
tools = ["bash", "finish"]
image = "base"
[limits]
max_turns = 2
[evaluate]
command = "echo 'no such module: grader' >&2; exit 3"
sandbox = "same"
"""


SESSIONS: dict[str, list[tuple[str, float | None]]] = {
    "alice": [
        ("What is 17 + 25?", 1.0),
        ("And 17 * 25?", None),
        ("No, I meant with 24.", -1.0),
        ("Thanks. What is 3 + 4?", 1.0),
    ],
    "bob": [("What is 6 * 7?", 1.0), ("And 60 * 7?", None)],
    "carol": [("What is 12 - 30?", -1.0)],
}
"""What users ask, and how they value the answers."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture: its file, the page's address below the service's, what to click first, and what to scroll to."""

    name: str
    path: str
    clicks: tuple[str, ...] = ()
    sight: str | None = None
    scheme: str = "light"


async def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description="Take the pictures of the page for the documentation.")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "pictures" / "dashboard")
    parser.add_argument("--sandbox", default="apptainer", help="what runs the tools")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        async with _service(Path(folder), arguments.sandbox) as client, anyio.create_task_group() as tasks:
            tasks.start_soon(_train, client, "calc-dapo", 8, True)
            tasks.start_soon(_train, client, "calc-small", 4, False)
            await _fail(client)
            session_id = await _serve(client)
            await _wait_for_history(client)
            for picture in await _pictures(client, session_id):
                await _take(client.base_url, picture, arguments.output)
            await _take_trace(client, Path(folder) / "trace.json", arguments.output)
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def _service(folder: Path, sandbox: str) -> AsyncIterator[RolloutClient]:
    broken = folder / "broken-grader"
    broken.mkdir()
    (broken / "environment.toml").write_text(BROKEN)
    flags = ["--sandbox", sandbox, "--model", "calc-base", "--rollout-workers", "8"]
    flags += ["--environment", str(broken), "--log-level", "warning"]
    async with running_server(folder / "state", flags) as client:
        yield client


async def _train(client: RolloutClient, run_id: str, group_size: int, loads_weights: bool) -> None:
    """Take the batches of a run as a trainer does; with `loads_weights`, load weights after each, later better ones."""
    request = RunRequest(
        run_id=run_id,
        source=DatasetTasks(environment="calc", split="train", epochs=None),
        group_size=group_size,
        batch_size=4,
        max_concurrent=6,
        advantages=Advantages.GROUP_NORM,
    )
    run = await client.create_run(request)
    version = 0
    async for _ in run.batches():
        if loads_weights:
            version += 1
            policy = "calc-base" if version < BETTER_FROM else "calc-tuned"
            await client.update_weights(str(policy_folder(policy)), version)
            await run.set_version(version)


async def _fail(client: RolloutClient) -> None:
    for number in range(3):
        task = Task(environment="broken-grader", instance={"question": f"What is {number} + 1?"})
        await client.submit(RolloutRequest(task=task))


async def _serve(client: RolloutClient) -> str:
    """Serve users' agents as live sessions, whose users like some answers; return the id of the longest session."""
    ids = []
    for user, questions in SESSIONS.items():
        opened = await client.open_session(SessionRequest(user=user, train=True))
        headers = {"authorization": f"Bearer {opened.key}"}
        messages: list[dict[str, Any]] = []
        async with httpx.AsyncClient(headers=headers, timeout=120) as agent:
            for number, (question, value) in enumerate(questions):
                messages.append({"role": "user", "content": question})
                answer = await agent.post(
                    f"{opened.url}/v1/chat/completions",
                    json={"model": "policy", "messages": messages, "max_tokens": 64},
                )
                messages.append(answer.raise_for_status().json()["choices"][0]["message"])
                if value is not None:
                    await client.feedback(opened.session.session_id, value, turn=number)
        ids.append(opened.session.session_id)
    return ids[0]


async def _wait_for_history(client: RolloutClient) -> None:
    """Wait until the plots have something to show."""
    with anyio.move_on_after(LONGEST_SECONDS):
        while True:
            runs = {run.run_id: run for run in await client.runs()}
            taken = runs["calc-dapo"].counts.batches_acknowledged if "calc-dapo" in runs else 0
            sys.stderr.write(f"batches: {taken} of {BATCHES}\n")
            if taken >= BATCHES:
                return
            await anyio.sleep(POLL_SECONDS)


async def _pictures(client: RolloutClient, session_id: str) -> list[Picture]:
    pages = await client.page(limit=200)
    solved = [one for one in pages.rollouts if one.reward and one.usage.tool_calls and one.usage.turns > 1]
    example = solved[0].rollout_id
    first, second = f"{example[:-1]}0", f"{example[:-1]}1"
    return [
        Picture("overview", "#/"),
        Picture("overview-dark", "#/", scheme="dark"),
        Picture("rollouts", "#/rollouts"),
        Picture("conversation", f"#/rollouts/{example}"),
        Picture("tokens", f"#/rollouts/{example}", ("Tokens", "Log-probability"), ".tokens"),
        Picture("compare", f"#/compare?ids={first},{second}"),
        Picture("runs", "#/runs"),
        Picture("run", "#/runs/calc-dapo"),
        Picture("sessions", "#/sessions"),
        Picture("session", f"#/sessions/{session_id}"),
        Picture("engines", "#/engines"),
        Picture("nodes", "#/nodes"),
        Picture("hangs", "#/hangs"),
    ]


async def _take(url: str, picture: Picture, output: Path) -> None:
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=_chromium())
        page: Page = await browser.new_page(
            viewport=SIZE,
            color_scheme="dark" if picture.scheme == "dark" else "light",
            device_scale_factor=1.5,
        )
        await page.goto(f"{url}/{picture.path}")
        await page.locator("main").wait_for()
        await anyio.sleep(SETTLE_SECONDS)
        for label in picture.clicks:
            named = page.get_by_role("tab", name=label).or_(page.get_by_role("button", name=label))
            await named.first.click()
            await anyio.sleep(SETTLE_SECONDS)
        if picture.sight is not None:
            await page.locator(picture.sight).first.evaluate("one => one.scrollIntoView({block: 'end'})")
            await anyio.sleep(SETTLE_SECONDS)
        await page.evaluate(SHORTEN, f"{ROOT}/")
        await page.screenshot(path=str(output / f"{picture.name}.png"))
        await browser.close()
    sys.stderr.write(f"{output / picture.name}.png\n")


async def _take_trace(client: RolloutClient, file: Path, output: Path) -> None:
    """Take a picture of the trace of a run in Perfetto, around an update of weights."""
    await write_trace(client, ["calc-dapo"], file)
    async with (
        async_playwright() as driver,
        await driver.chromium.launch(executable_path=_chromium()) as browser,
        perfetto_page(browser, file, viewport=SIZE, device_scale_factor=1.5) as perfetto,
    ):
        *_, update = await perfetto.rows("select ts / 1e9 from slice where name like 'weights %' order by ts")
        turn, *_ = await perfetto.rows(f"select id from slice where name = 'turn 0' and ts > {update} * 1e9")
        await perfetto.pin(r"^policy weights|slot [1-3]\b|^tokens")
        await perfetto.select(turn)
        await perfetto.show(update - BEFORE_SECONDS, update + AFTER_SECONDS)
        await perfetto.page.screenshot(path=str(output / "perfetto.png"))
    sys.stderr.write(f"{output / 'perfetto.png'}\n")


def _chromium() -> str:
    found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
    if found is None:
        raise SystemExit("there is no Chromium; install it with: apt-get install chromium-headless-shell")
    return found


if __name__ == "__main__":
    anyio.run(main)
