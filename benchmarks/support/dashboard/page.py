"""Measure how fast a trajectory of 100,000 tokens is on the screen, and how smoothly it scrolls.

A real service in a process of its own serves the page, and the trajectory from its store; a real headless Chromium with
software rendering looks at it, at 1280x800. The text is that of pages of the documentation, by a byte-level tokenizer
with 512 entries, so a line holds several times as many tokens as with a usual vocabulary.

`first_paint_ms` is the median of several visits, each in a new context without a cache: from the navigation
to the first frame in which lines of tokens are in the document, by the browser's own clock, with all
requests. `loaded_ms` goes on until the last token has come. `scroll_fps` scrolls through the whole trajectory
by the same distance in each frame, and is one over the median time between frames, as `requestAnimationFrame`
gives it; a headless browser has no more than 60. `scroll_fps_worst` is that of the slowest twentieth of the
frames. `longest_task_ms` is the longest time for which the page's scripts held up everything else, in any visit or
while scrolling; the browser reports those over 50 ms, and 0 stands for none.

`saved_mb` is the size of the trajectory's file, in megabytes, and `saved_made_ms` the time in which the service answers
with it; `saved_paint_ms` and `saved_loaded_ms` are what `first_paint_ms` and `loaded_ms` are, with the file opened from
the disk.
"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle, pairwise
from pathlib import Path

import anyio
from playwright.async_api import Browser, Page, ViewportSize, expect

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, StopReason, Usage
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, ForkReason, Message, Segment, Trajectory
from rollout_client.client import RolloutClient
from rollout_service.cli.server_child import running_server
from rollout_service.engines.shipped import policy_folder
from rollout_service.store.sqlite import SqliteStore
from rollout_service.tokens.tokenizer import load_tokenizer
from tests.support.browser.watched_page import chromium

DOCS = Path(__file__).resolve().parents[3] / "docs"
TURNS = 100
ALL_THERE = re.compile(r"^[\d,]+ tokens$")
LOAD_MS = 60_000
VIEW = ViewportSize(width=1280, height=800)
ROLLOUT_ID = "long"

WATCH = """
window.measured = {shown: null, loaded: null, longest: 0};
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) measured.longest = Math.max(measured.longest, task.duration);
}).observe({type: "longtask", buffered: true});
const look = () => {
  if (measured.shown === null && document.querySelector(".token-line .t")) measured.shown = performance.now();
  const status = document.querySelector(".tokens [role=status]")?.textContent ?? "";
  if (measured.loaded === null && /^[0-9,]+ tokens$/.test(status)) measured.loaded = performance.now();
  if (measured.shown === null || measured.loaded === null) requestAnimationFrame(look);
};
requestAnimationFrame(look);
"""
"""Runs before the page's own scripts. A frame that follows the lines' arrival in the document paints them."""

SCROLL = """
(frames) => new Promise((done) => {
  const box = document.querySelector(".token-lines");
  const whole = box.scrollHeight - box.clientHeight;
  const times = [];
  let frame = 0;
  const move = (now) => {
    times.push(now);
    box.scrollTop = (whole * frame) / frames;
    frame += 1;
    if (frame <= frames) requestAnimationFrame(move);
    else done(times);
  };
  requestAnimationFrame(move);
})
"""


@dataclass(frozen=True, slots=True)
class Plan:
    tokens: int
    visits: int
    frames: int
    """The frames of scrolling through all tokens; the slowest twentieth has a figure of its own."""


FULL = Plan(tokens=100_000, visits=3, frames=600)
SMOKE = Plan(tokens=2_000, visits=1, frames=20)


def text_ids(tokens: int) -> list[int]:
    """Return so many token ids of the documentation's text."""
    tokenizer = load_tokenizer(str(policy_folder("calc-base")), with_template=False)
    ids: list[int] = []
    for page in cycle(sorted(DOCS.rglob("*.md"))):
        ids += tokenizer.encode(page.read_text(), add_special_tokens=False)
        if len(ids) >= tokens:
            return ids[:tokens]
    raise AssertionError("a cycle does not end")


def trajectory(tokens: int) -> Trajectory:
    """Return a trajectory of one segment, half of whose tokens are sampled, in a hundred turns."""
    chance = random.Random(7)
    each = tokens // (2 * TURNS)
    sampled = [at // each % 2 == 1 for at in range(tokens)]
    segment = Segment(
        token_ids=text_ids(tokens),
        loss_mask=[int(on) for on in sampled],
        logprobs=[-chance.expovariate(2.0) if on else 0.0 for on in sampled],
        versions=[at // (tokens // 4) if on else -1 for at, on in enumerate(sampled)],
        turn_ids=[min(at // (2 * each), TURNS - 1) if on else -1 for at, on in enumerate(sampled)],
        fork_reason=ForkReason.FIRST,
    )
    return Trajectory(
        segments=[segment],
        messages=[Message(role="user", content="A long task."), Message(role="assistant", content="Done.")],
        finish_reasons=[FinishReason.STOP] * TURNS,
        fork_counts={ForkReason.FIRST: 1},
    )


async def fill(path: Path, tokens: int) -> None:
    """Write a store with one rollout that has ended."""
    task = Task(environment="calc")
    rollout = Rollout(
        rollout_id=ROLLOUT_ID,
        state=RolloutState.COMPLETED,
        task=task,
        pool="policy",
        attempt=1,
        reward=1.0,
        stop_reason=StopReason.FINISHED,
        usage=Usage(turns=TURNS, sampled_tokens=tokens // 2),
        created_at=datetime.now(UTC),
        finished_at=datetime.now(UTC),
        trajectory=trajectory(tokens),
    )
    async with await SqliteStore.open(path) as store:
        await store.submit(RolloutRequest(rollout_id=ROLLOUT_ID, task=task))
        [lease] = await store.claim("w", limit=1, lease_seconds=100)
        assert await store.finish(lease, "w", rollout)


async def save(client: RolloutClient, file: Path) -> float:
    """Save the trajectory's page, and return the milliseconds until it was there."""
    began = time.perf_counter()
    content = await client.saved_page(ROLLOUT_ID)
    seconds = time.perf_counter() - began
    await anyio.Path(file).write_bytes(content)
    return 1000 * seconds


@asynccontextmanager
async def opened(browser: Browser, address: str) -> AsyncIterator[Page]:
    """Open the tokens in a new context, and wait until all of them are there."""
    context = await browser.new_context(viewport=VIEW)
    try:
        page = await context.new_page()
        await page.add_init_script(WATCH)
        await page.goto(f"{address}#/rollouts/{ROLLOUT_ID}?tab=tokens")
        await expect(page.locator(".tokens [role=status]")).to_have_text(ALL_THERE, timeout=LOAD_MS)
        await page.wait_for_function("measured.shown !== null && measured.loaded !== null")
        yield page
    finally:
        await context.close()


async def visit(browser: Browser, address: str) -> dict[str, float]:
    """Return when the tokens were shown and all there, in milliseconds."""
    async with opened(browser, address) as page:
        return dict(await page.evaluate("measured"))


async def scroll(browser: Browser, address: str, frames: int) -> tuple[list[float], float]:
    """Scroll through all tokens; return the seconds between frames, and the longest task in milliseconds."""
    async with opened(browser, address) as page:
        await page.locator(".token-lines").evaluate("box => box.scrollIntoView({block: 'end'})")
        times = await page.evaluate(SCROLL, frames)
        longest: float = await page.evaluate("measured.longest")
    return [(after - before) / 1000 for before, after in pairwise(times)], longest


async def measure(plan: Plan) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="page-", ignore_cleanup_errors=True) as name:
        state_dir = Path(name)
        await fill(state_dir / "rollouts.sqlite3", plan.tokens)
        file = state_dir / "saved.html"
        flags = ["--engine", "embedded", "--sandbox", "local"]  # the engine for its tokenizer
        async with running_server(state_dir, flags) as client, chromium() as browser:
            address = f"{client.base_url}/"
            await visit(browser, address)  # the first page starts the browser's processes
            visits = [await visit(browser, address) for _ in range(plan.visits)]
            gaps, longest = await scroll(browser, address, plan.frames)
            made = [await save(client, file) for _ in range(plan.visits)]
            saved = [await visit(browser, file.as_uri()) for _ in range(plan.visits)]
            size = file.stat().st_size
    slowest = sorted(gaps, reverse=True)[: len(gaps) // 20]
    return {
        "first_paint_ms": round(statistics.median(one["shown"] for one in visits), 1),
        "loaded_ms": round(statistics.median(one["loaded"] for one in visits), 1),
        "scroll_fps": round(1 / statistics.median(gaps), 1),
        "scroll_fps_worst": round(1 / statistics.mean(slowest), 1),
        "longest_task_ms": round(max(longest, *(one["longest"] for one in visits)), 1),
        "saved_mb": round(size / 1e6, 2),
        "saved_made_ms": round(statistics.median(made), 1),
        "saved_paint_ms": round(statistics.median(one["shown"] for one in saved), 1),
        "saved_loaded_ms": round(statistics.median(one["loaded"] for one in saved), 1),
    }
