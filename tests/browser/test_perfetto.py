"""Perfetto's own page opens the traces of a service at work, and shows what the rollouts, engines and sandboxes did."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from docs_site.perfetto import PerfettoPage, perfetto_page
from playwright.async_api import Browser, expect
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from tests.support.api.server import api_server
from tests.support.processes.service import scripted_engine
from tests.support.turns import called, handed_on, turn_of

pytestmark = [pytest.mark.browser, pytest.mark.perfetto]

ENVIRONMENT = """
name = "survey"
image = "base"
tools = ["bash", "finish"]
prompt = "Ask two readers."

[parallel.subagent]
needs_tool_call = false

[evaluate]
command = "echo '{\\"reward\\": 1.0}' > $ROLLOUT_RESULT"
sandbox = "same"
"""
PROBLEMS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
SLICES = """
select process.name, thread.name, slice.name, slice.dur from slice
join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)
order by slice.ts, slice.depth
"""


TURNS = (
    handed_on("A", "B"),
    turn_of(called("bash", command="echo hello")),
    turn_of(called("finish", answer="both")),
)


@dataclass(frozen=True)
class Traced:
    """A trace as Perfetto shows it, and the events of its file."""

    shown: PerfettoPage
    events: list[dict[str, Any]]


async def work(url: str, frozen: str, names: list[str]) -> None:
    """Run the first two rollouts at once, load weights, and run the third."""
    async with RolloutClient(url) as client:
        await client.add_backend(BackendSpec(url=HttpUrl(frozen), pool="frozen-1"))
        task = Task(environment="survey", instance={"n": 1})
        for name in names[:2]:
            await client.submit(RolloutRequest(rollout_id=name, task=task))
        for name in names[:2]:
            assert (await client.wait(name)).state is RolloutState.COMPLETED
        await client.update_weights("/weights/7", 7)
        await client.submit(RolloutRequest(rollout_id=names[2], task=task))
        assert (await client.wait(names[2])).state is RolloutState.COMPLETED


def write_trace(url: str, names: list[str], file: Path) -> None:
    command = [sys.executable, "-m", "rollout_service.cli", "trace", *names, "-o", str(file), "--url", url]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Run a service with two engines; yield its address, and that of the engine for sub-agents."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "survey").mkdir()
    (folder / "survey" / "environment.toml").write_text(ENVIRONMENT)
    with (
        scripted_engine(folder, *TURNS, delay=0.5, name="policy") as first,
        scripted_engine(folder, "<result>4</result><|im_end|>", delay=0.2, name="frozen") as second,
        api_server(folder, "--environment", str(folder / "survey"), "--backend", first.url) as started,
    ):
        yield started.url, second.url


@pytest.fixture(scope="module")
async def traced(
    browser: Browser, server: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Traced]:
    url, frozen = server
    file = tmp_path_factory.mktemp("trace") / "three.json"
    await work(url, frozen, ["r-1", "r-2", "r-3"])
    write_trace(url, ["r-1", "r-2", "r-3"], file)
    async with perfetto_page(browser, file) as shown:
        yield Traced(shown, json.loads(file.read_bytes())["traceEvents"])


async def assert_whole(shown: PerfettoPage, events: list[dict[str, Any]]) -> None:
    """Check that Perfetto took each slice of a file as it is, reports no problem, and drew all arrows."""
    assert await shown.rows(PROBLEMS) == []
    found = Counter(await shown.rows("select name from slice"))
    assert found == Counter(event["name"] for event in events if event["ph"] in "Xi")
    threads = {event["tid"] for event in events if event["ph"] in "Xi"}
    assert await shown.rows("select count(distinct track_id) from slice") == [len(threads)]
    lengths = sorted(event["dur"] * 1_000 for event in events if event["ph"] == "X")
    assert await shown.rows("select dur from slice where dur > 0 order by dur") == [
        length for length in lengths if length
    ]
    arrows = sum("flow_in" in event for event in events)
    assert await shown.rows("select count(*) from flow") == [arrows]


async def test_perfetto_takes_the_whole_trace_without_a_problem(traced):
    await assert_whole(traced.shown, traced.events)
    assert sum("flow_in" in event for event in traced.events) >= 3 * (len(TURNS) + 2)


async def test_the_lanes_of_rollouts_sub_agents_engines_and_sandboxes_are_there(traced):
    slices = await traced.shown.rows(SLICES)
    threads: dict[str, set[str]] = {}
    for process, thread, _, _ in slices:
        threads.setdefault(process, set()).add(thread.replace("@127.0.0.1", "").split(":")[0])
    assert threads["rollouts"] >= {"lane 1", "lane 1, beside 1", "lane 1, beside 2", "lane 2"}
    assert threads["sandboxes"] == {"sandbox lane 1", "sandbox lane 2"}
    assert threads["engines"] == {"policy", "frozen-1", "policy weights"}
    names = {process: {name for at, _, name, _ in slices if at == process} for process in threads}
    assert names["rollouts"] >= {
        *("r-1", "r-2", "r-3"),
        *("init", "rollout", "evaluate"),
        *("turn 0", "turn 1", "turn 2"),
        *("sub-agent 1", "sub-agent 2"),
        *("bash", "start sandbox", "end sandbox"),
    }
    assert names["engines"] >= {f"r-{number} #{turn}" for number in (1, 2, 3) for turn in range(3)}


async def test_the_update_of_weights_lies_between_the_rollouts_that_it_parts(traced):
    slices = await traced.shown.rows(SLICES)
    updates = [(thread, name) for process, thread, name, _ in slices if name.startswith("weights")]
    assert updates == [("policy weights", "weights 7")]
    order = [name for process, _, name, _ in slices if process == "engines" and "#" not in name]
    assert order == ["weights 7"]
    engines = [name for process, _, name, _ in slices if process == "engines"]
    assert engines.index("weights 7") < min(engines.index(f"r-3 #{turn}") for turn in range(3))
    assert engines.index("weights 7") > max(engines.index(f"r-{n} #{turn}") for n in (1, 2) for turn in range(3))
    assert await traced.shown.rows(
        "select display_value from args join slice using (arg_set_id) "
        "where slice.name = 'weights 7' and key = 'args.version'"
    ) == ["7"]


async def test_the_tracks_are_on_the_screen(traced):
    page = traced.shown.page
    for process in ("rollouts 1", "engines 2", "sandboxes 3"):
        await expect(page.locator(".pf-track__title", has_text=process).first).to_be_visible()
    await traced.shown.expand("engines 2")
    for track in ("policy weights", "tokens per second"):
        await expect(page.locator(".pf-track__title", has_text=track).first).to_be_visible()
    await traced.shown.expand("rollouts 1")
    for track in ("lane 1, beside 1", "rollouts at work"):
        await expect(page.locator(".pf-track__title", has_text=track).first).to_be_visible()


@pytest.fixture
def crossing(tmp_path: Path) -> Path:
    """A trace with two slices that cross each other."""
    file = tmp_path / "crossing.json"
    times = {"a": 0, "b": 5}
    events = [{"ph": "X", "name": name, "pid": 1, "tid": 1_000, "ts": at, "dur": 10} for name, at in times.items()]
    file.write_text(json.dumps({"traceEvents": events}))
    return file


async def test_perfetto_reports_slices_that_do_not_nest(browser, crossing):
    async with perfetto_page(browser, crossing) as shown:
        assert await shown.rows(PROBLEMS) == [("slice_drop_overlapping_complete_event", 1)]
