"""The pages of runs and sessions show what the API says, follow it, and steer runs only where the key allows it."""

import re

import pytest
from playwright.async_api import Page, expect
from starlette.requests import Request

from api_schemas.runs import Branching, RunState
from api_schemas.runs.history import GroupPage
from rollout_service.http.keyring import Role
from tests.support.browser import canned_runs
from tests.support.browser.axe import violations
from tests.support.browser.fake_service import FakeService
from tests.support.browser.watched_page import watched_page
from tests.support.waiting import until

pytestmark = pytest.mark.browser

RUN = f"/v1/runs/{canned_runs.RUN}"

READ_KEY = "a-key-that-may-only-read"
COUNT_COLORS = """(canvas) => {
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colors = new Set();
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] > 200) colors.add(`${data[at]} ${data[at + 1]} ${data[at + 2]}`);
  }
  return colors.size;
}"""


@pytest.fixture
def runs(fake: FakeService) -> FakeService:
    """Answer for a run, its history and its groups, and for a session."""
    fake.answer("GET /v1/runs", canned_runs.runs())
    fake.answer(f"GET {RUN}", canned_runs.run())
    fake.answer(f"GET {RUN}/history", canned_runs.history())
    fake.answer(f"GET {RUN}/groups", canned_runs.groups())
    fake.answer("GET /v1/sessions", canned_runs.sessions())
    fake.answer("GET /v1/sessions/s-4711", canned_runs.whole_session())
    return fake


async def open_run(page: Page, fake: FakeService, query: str = "") -> None:
    await page.goto(f"{fake.url}#/runs/{canned_runs.RUN}{query}")
    await expect(page.get_by_role("heading", level=1)).to_have_text(canned_runs.RUN)


async def test_the_runs_are_listed_the_newest_first_with_their_problems(page, runs):
    await page.goto(f"{runs.url}#/runs")
    rows = page.get_by_role("row")
    await expect(rows).to_have_count(4)
    await expect(rows.nth(1)).to_contain_text("math-grpo-7")
    await expect(rows.nth(1)).to_contain_text("63 %")
    await expect(rows.nth(2)).to_contain_text("has changed since the run began")
    await page.get_by_role("link", name="math-grpo-7").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("math-grpo-7")


async def test_plots_are_drawn_and_can_be_read_without_seeing_them(page, runs):
    await open_run(page, runs)
    plots = page.locator(".plot")
    await expect(plots).to_have_count(6)
    for number in range(6):
        canvas = plots.nth(number).locator("canvas")
        await expect(canvas).to_be_visible()
        painted = await canvas.evaluate(COUNT_COLORS)
        assert painted > 3, "more than the lines of the grid"
    reward = page.get_by_role("img", name=re.compile("^Reward, 120 points. Last: mean 0.69"))
    await expect(reward).to_be_visible()
    await plots.nth(0).get_by_text("Values", exact=True).click()
    await expect(plots.nth(0).get_by_role("row")).to_have_count(121)


async def test_a_plot_says_the_values_under_the_pointer(page, runs):
    await open_run(page, runs)
    plot = page.locator(".plot").nth(3)
    last = await plot.locator(".plot-legend .mono").inner_text()
    await plot.locator(".u-over").hover(position={"x": 2, "y": 20})
    await expect(plot.locator(".plot-legend .mono")).not_to_have_text(last)
    await page.mouse.move(0, 0)
    await expect(plot.locator(".plot-legend .mono")).to_have_text(last)


async def test_plots_follow_the_colors_and_the_width_of_the_page(page, runs):
    await open_run(page, runs)
    canvas = page.locator(".plot canvas").first
    await expect(canvas).to_be_visible()
    light = await canvas.evaluate("(canvas) => canvas.toDataURL()")
    await page.keyboard.press("t")
    assert await page.locator(".plot canvas").first.evaluate("(canvas) => canvas.toDataURL()") != light
    await page.set_viewport_size({"width": 700, "height": 800})
    await expect(page.locator(".plot canvas").first).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth") <= 700


def two_pages(request: Request) -> GroupPage:
    if request.query_params.get("cursor") == "next":
        return canned_runs.groups(newest=2_013, cursor=None)
    return canned_runs.groups()


async def test_groups_are_drawn_as_far_as_they_can_be_seen_and_fetched_as_one_scrolls(page, runs):
    del runs.answers[f"GET {RUN}/groups"]
    runs.handlers[f"GET {RUN}/groups"] = two_pages
    await open_run(page, runs)
    groups = page.get_by_role("list", name="Groups, the newest first")
    await expect(groups.get_by_role("listitem").first).to_contain_text("2113")
    assert await groups.get_by_role("listitem").count() < 40
    await groups.evaluate("(element) => (element.scrollTop = 60 * 30)")
    await expect(groups.get_by_role("listitem").first).to_have_attribute("aria-setsize", "200")
    assert any("cursor=next" in path for _, path, _ in runs.requests)


async def test_a_sample_says_its_reward_and_leads_to_its_rollout(page, runs):
    await open_run(page, runs)
    sample = page.get_by_role("link", name="Sample 1: completed, reward 0.1, 1,510 tokens").first
    await expect(sample).to_have_attribute("href", re.compile(r"#/rollouts/math-grpo-7\.\d+\.1"))
    failed = page.get_by_role("link", name="Sample 7: failed, sandbox_out_of_memory").first
    await expect(failed).to_have_text("\u00d7")
    compare = page.get_by_role("link", name="Compare group 2107")
    await expect(compare).to_have_attribute("href", re.compile(r"#/compare\?ids=math-grpo-7\.2107\.0%2C"))
    await expect(page.get_by_role("link", name="Tree of group 2107")).to_have_count(0)


async def test_a_group_of_a_run_with_branches_leads_to_its_tree(page, runs):
    found = canned_runs.run()
    branching = found.request.model_copy(update={"branching": Branching(roots=4)})
    runs.answer(f"GET {RUN}", found.model_copy(update={"request": branching}))
    await open_run(page, runs)
    tree = page.get_by_role("link", name="Tree of group 2107")
    await expect(tree).to_have_attribute("href", "#/rollouts/math-grpo-7.2107.0?tab=branches")


async def test_groups_are_filtered_by_state_and_reason(page, runs):
    await open_run(page, runs)
    async with page.expect_request(re.compile("/groups.*state=dropped")):
        await page.get_by_label("State").select_option("dropped")
    await expect(page).to_have_url(re.compile("state=dropped"))
    filled = canned_runs.groups(cursor=None)
    runs.answer(f"GET {RUN}/groups", GroupPage(groups=[]))
    await page.get_by_role("combobox", name="Reason").select_option("stale")
    await expect(page.get_by_text("No group was dropped for stale.")).to_be_visible()
    assert any("state=dropped&reason=stale" in path for _, path, _ in runs.requests)
    runs.answer(f"GET {RUN}/groups", GroupPage(groups=[one for one in filled.groups if one.reason]))
    await page.get_by_role("combobox", name="Reason").select_option("zero_variance")
    rows = page.get_by_role("list", name="Groups, the newest first").get_by_role("listitem")
    await expect(rows.first).to_contain_text("zero_variance")


async def test_groups_are_found_behind_pages_without_any(page, runs):
    runs.answer(f"GET {RUN}/groups", GroupPage(groups=[], next_cursor="on"))
    await open_run(page, runs, "?state=ready")
    await until(lambda: any("cursor=on" in path for _, path, _ in runs.requests), 15)
    await expect(page.get_by_text("Loading")).to_be_visible()
    runs.answer(f"GET {RUN}/groups", canned_runs.groups(count=1, cursor=None))
    runs.emit("group.closed", subject="math-grpo-7.0")
    rows = page.get_by_role("list", name="Groups, the newest first").get_by_role("listitem")
    await expect(rows).to_have_count(1)


async def test_a_group_whose_rollouts_are_deleted_says_so(page, runs):
    bare = canned_runs.groups(count=1).groups[0].model_copy(update={"samples": []})
    runs.answer(f"GET {RUN}/groups", GroupPage(groups=[bare]))
    await open_run(page, runs)
    await expect(page.get_by_role("listitem").filter(has_text="2113")).to_contain_text("deleted")
    await expect(page.get_by_role("link", name="Compare group 2113")).to_have_count(0)


async def test_a_group_that_changes_is_drawn_anew(page, runs):
    await open_run(page, runs)
    first = page.get_by_role("list", name="Groups, the newest first").get_by_role("listitem").first
    await expect(first).to_contain_text("open")
    page_of_groups = canned_runs.groups()
    closed = page_of_groups.groups[0].model_copy(update={"state": "ready", "reward_mean": 0.875})
    changed = GroupPage(groups=[closed, *page_of_groups.groups[1:]], next_cursor="next")
    runs.answer(f"GET {RUN}/groups", changed)
    runs.answer(f"GET {RUN}", canned_runs.run(version=43))
    runs.emit("rollout.state", subject="r", at="2026-01-01T00:00:00Z", data={})
    await expect(first).to_contain_text("0.88")
    await expect(page.get_by_text("version 43")).to_be_visible()


@pytest.mark.parametrize(
    ("state", "button", "patched"),
    [
        (RunState.RUNNING, "Pause", "paused"),
        (RunState.PAUSED, "Resume", "running"),
        (RunState.RUNNING, "End", "ended"),
    ],
)
async def test_a_run_is_steered_only_after_a_question(page, runs, state, button, patched):
    runs.answer(f"GET {RUN}", canned_runs.run(state))
    runs.answer(f"PATCH {RUN}", canned_runs.run())
    await open_run(page, runs)
    await page.get_by_role("button", name=button).click()
    dialog = page.get_by_role("dialog")
    await expect(dialog).to_contain_text(canned_runs.RUN)
    await dialog.get_by_role("button", name="Back").click()
    assert not [request for request in runs.requests if request[0] == "PATCH"]
    await page.get_by_role("button", name=button).click()
    await dialog.get_by_role("button", name=button).click()
    await expect(dialog).to_have_count(0)
    assert ("PATCH", RUN, {"state": patched}) in runs.requests


async def test_a_refusal_is_shown_in_the_question(page, notes, runs):
    notes.expected_statuses.add(409)
    problem = {"title": "Conflict", "status": 409, "code": "conflict", "detail": "the run has ended"}
    runs.answer(f"PATCH {RUN}", problem, status=409)
    await open_run(page, runs)
    await page.get_by_role("button", name="Pause").click()
    await page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    await expect(page.get_by_role("alert").filter(has_text="the run has ended")).to_be_visible()


async def test_a_key_that_may_only_read_cannot_steer(page, runs):
    runs.keys = {READ_KEY: Role.READ}
    await page.add_init_script(f"sessionStorage.setItem('rollout-key', '{READ_KEY}')")
    await open_run(page, runs)
    for name in ("Pause", "End"):
        button = page.get_by_role("button", name=name)
        await expect(button).to_be_disabled()
        await expect(button).to_have_attribute("title", re.compile("needs the role submit"))


async def test_a_run_that_has_begun_nothing_says_so(page, runs):
    runs.answer(f"GET {RUN}/history", canned_runs.history(0))
    runs.answer(f"GET {RUN}/groups", GroupPage(groups=[]))
    await open_run(page, runs)
    await expect(page.get_by_text("No group has closed yet.")).to_be_visible()
    await expect(page.get_by_text("No group has begun.")).to_be_visible()


async def test_a_run_with_one_closed_group_is_drawn(page, runs):
    runs.answer(f"GET {RUN}/history", canned_runs.history(1))
    await open_run(page, runs)
    await expect(page.locator(".plot canvas")).to_have_count(6)


async def test_sessions_are_listed_and_lead_to_their_turns_and_rollouts(page, runs):
    await page.goto(f"{runs.url}#/sessions")
    await expect(page.get_by_role("row")).to_have_count(3)
    async with page.expect_request(re.compile("/v1/sessions.*open=true")):
        await page.get_by_role("tab", name="Open").click()
    await expect(page).to_have_url(re.compile("show=open"))
    await expect(page.get_by_role("tab", name="Open")).to_have_attribute("aria-selected", "true")
    await page.get_by_role("link", name="s-4711").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("s-4711")
    await expect(page.get_by_role("link", name="live-1.3.0")).to_have_attribute("href", "#/rollouts/live-1.3.0")
    turns = page.get_by_role("table").last.get_by_role("row")
    await expect(turns.nth(1)).to_contain_text("+1")
    await expect(turns.nth(2)).to_contain_text("side")
    await expect(turns.nth(3)).to_contain_text("explicit")


async def test_a_session_whose_id_is_hostile_is_text(page, runs):
    name = "a/b?c#<img src=x onerror=alert(1)>\u202e"
    sessions = canned_runs.sessions().model_copy(update={"sessions": [canned_runs.session(name)]})
    runs.answer("GET /v1/sessions", sessions)
    path = name.replace("?", "%3F").replace("#", "%23")
    runs.answer(f"GET /v1/sessions/{path}", canned_runs.session(name))
    await page.goto(f"{runs.url}#/sessions")
    await page.get_by_role("row").last.get_by_role("link").click()
    await expect(page.get_by_role("heading", level=1)).to_contain_text("a/b?c#<img src=x onerror=alert(1)>")
    await expect(page.get_by_text("acme")).to_be_visible()
    assert await page.locator("img").count() == 0


async def test_a_session_is_ended_after_a_question(page, runs):
    runs.answer("POST /v1/sessions/s-4711/end", canned_runs.session())
    await page.goto(f"{runs.url}#/sessions/s-4711")
    await page.get_by_role("button", name="End").click()
    await page.get_by_role("dialog").get_by_role("button", name="End").click()
    await expect(page.get_by_role("dialog")).to_have_count(0)
    assert ("POST", "/v1/sessions/s-4711/end", None) in runs.requests


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("address", ["runs", f"runs/{canned_runs.RUN}", "sessions", "sessions/s-4711"])
async def test_axe_finds_nothing_serious(browser, runs, address, scheme):
    async with watched_page(browser, color_scheme=scheme) as (page, _):
        await page.goto(f"{runs.url}#/{address}")
        await expect(page.get_by_role("status")).to_have_text("Live")
        await expect(page.locator("table, canvas").last).to_be_visible()
        assert await violations(page) == []
