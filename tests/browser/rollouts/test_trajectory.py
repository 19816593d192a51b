"""The page of a rollout: its timeline, its conversation, and its prompts."""

from datetime import timedelta

import pytest
from playwright.async_api import Page, expect

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import RolloutState
from api_schemas.rollouts.steps import StepKind
from api_schemas.trajectories import Message
from api_schemas.views.hangs import OpenWait, RolloutActivity, StackFrame
from api_schemas.views.summaries import SummaryPage
from tests.support.browser.fake_service import FakeService
from tests.support.browser.trajectories import BEGAN, coding_rollout, step, summary

pytestmark = pytest.mark.browser

ID = "math-7.g12.s3"


async def opened(page: Page, fake: FakeService, tab: str = "conversation") -> None:
    coding_rollout(ID).serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}?tab={tab}")
    await expect(page.get_by_role("heading", level=1)).to_contain_text(ID)


async def test_the_head_says_what_became_of_it(page, fake):
    await opened(page, fake)
    head = page.locator(".rollout-head")
    for text in ["completed", "finished", "41 tokens", "50 % cached", "tests", "format"]:
        await expect(head).to_contain_text(text)
    await expect(head.get_by_role("link", name="math-7")).to_have_attribute("href", "#/runs/math-7")


async def test_a_failure_is_told_with_its_hint_and_the_attempts_before(page, fake):
    rollout = coding_rollout(ID)
    error = ErrorInfo(
        code="tool_timeout",
        boundary=Boundary.SANDBOX,
        message="no answer",
        hint="Raise the limit.",
        attempt=2,
    )
    rollout.changes = {
        "state": RolloutState.FAILED,
        "reward": None,
        "error": error,
        "retries": [error.model_copy(update={"code": "sandbox_lost", "attempt": 1})],
    }
    rollout.serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}")
    await expect(page.get_by_role("alert").filter(has_text="tool_timeout")).to_contain_text("Raise the limit.")
    await expect(page.locator(".rollout-head")).to_contain_text("Attempt 1 failed and was tried again: sandbox_lost")
    await expect(page.locator(".reward")).to_have_text("\u2013")


async def test_the_samples_of_its_group_are_a_link_away(page, fake):
    coding_rollout(ID).serve(fake)
    rows = [summary(f"math-7.g12.s{number}", run_id="math-7", group=12) for number in (2, 3, 4)]
    fake.answer("GET /v1/summaries", SummaryPage(rows=rows))
    await page.goto(f"{fake.url}#/rollouts/{ID}")
    neighbors = page.locator(".neighbors")
    await expect(neighbors).to_contain_text("sample 2 of 3")
    await expect(neighbors.get_by_role("link", name="next")).to_have_attribute("href", "#/rollouts/math-7.g12.s4")
    await expect(neighbors.get_by_role("link", name="compare")).to_have_attribute(
        "href", "#/compare?ids=math-7.g12.s3%2Cmath-7.g12.s4"
    )


async def test_the_timeline_has_lanes_with_the_details_of_each_bar(page, fake):
    await opened(page, fake)
    lanes = page.locator(".lane-title")
    await expect(lanes).to_have_text(["stages", "agent", "tools", "sandbox"])
    await expect(page.locator(".version-mark")).to_have_text(["v3", "v4"])
    await page.locator(".tl-bar", has_text="engine b1").hover()
    details = page.locator(".timeline-details")
    await expect(details).to_contain_text("3.2 s")
    await expect(details).to_contain_text("req-1")


async def test_the_timeline_is_walked_and_zoomed_with_keys(page, fake):
    await opened(page, fake)
    box = page.locator(".timeline-box")
    await box.focus()
    titles = []
    for _ in range(3):
        await page.keyboard.press("ArrowRight")
        titles.append(await page.locator(".bar-title").inner_text())
    assert titles == ["waits for init", "init", "sandbox start swe-base"]
    ticks = page.locator(".tick")
    before = await ticks.all_text_contents()
    await page.keyboard.press("+")
    await expect(page.locator(".timeline").get_by_role("button", name="all")).to_be_enabled()
    assert await ticks.all_text_contents() != before
    await page.keyboard.press("0")
    assert await ticks.all_text_contents() == before


async def test_sub_agents_and_tools_at_once_have_rows_of_their_own(page, fake):
    rollout = coding_rollout(ID)
    rollout.steps += [
        step(StepKind.TOOL, 8.5, 2.0, "bash", lane="call_7", call="call_7"),
        step(StepKind.ENGINE, 9.0, 1.0, "b1", lane="2", turn=0),
        step(StepKind.TOOL, 9.2, 1.0, "python", lane="2/call_0", call="call_0"),
    ]
    rollout.serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}")
    await expect(page.locator(".lane-title")).to_have_text(["stages", "agent", "tools", "sandbox", "sub-agent 2"])
    tops = [
        await page.locator(".tl-bar.tone-tool", has_text=name).first.evaluate("bar => bar.getBoundingClientRect().top")
        for name in ("tool bash", "tool python")
    ]
    assert tops[0] != tops[1]


async def test_a_rollout_under_way_shows_what_it_waits_for(page, fake):
    rollout = coding_rollout(ID)
    rollout.changes = {"state": RolloutState.ROLLOUT, "reward": None, "finished_at": None, "spans": []}
    rollout.steps = []
    rollout.serve(fake)
    path = f"/v1/rollouts/{ID}/activity"
    activity = RolloutActivity(
        rollout_id=ID,
        node="node-a",
        environment="code",
        attempt=1,
        stage=None,
        since=BEGAN,
        waits=[OpenWait(kind=StepKind.ENGINE, name="b7", since=BEGAN + timedelta(seconds=2), seconds=41.0)],
        stack=[StackFrame(file="pool.py", line=3, function="generate", ours=True)],
    )
    fake.answer(f"GET {path}", activity)
    await page.goto(f"{fake.url}#/rollouts/{ID}")
    now = page.get_by_role("region", name="Now")
    await expect(now).to_contain_text("engine b7 for 41 s")
    await expect(page.locator(".tl-bar.open")).to_have_count(1)
    await expect(page.get_by_role("tab")).to_have_text(["Raw"])
    rollout.changes = {}
    rollout.serve(fake)  # it ends, and the page follows
    await expect(page.get_by_role("tab", name="Tokens")).to_be_visible()
    await expect(now).to_have_count(0)


async def test_a_conversation_is_told_with_turns_tools_and_times(page, fake):
    await opened(page, fake)
    messages = page.locator(".message")
    await expect(messages).to_have_count(5)
    third = messages.nth(2)
    await expect(third).to_contain_text("turn 0")
    await expect(third).to_contain_text("weights 3")
    await expect(third.locator(".tool-call")).to_contain_text("2.6 s")
    await expect(third.locator(".reasoning")).to_contain_text("The parser cuts")
    await expect(messages.nth(3)).to_contain_text("test_nested PASSED")
    await expect(third.get_by_role("link", name="turn 0")).to_have_attribute(
        "href", f"#/rollouts/{ID}?tab=tokens&turn=0"
    )


async def test_kinds_of_messages_can_be_left_out(page, fake):
    await opened(page, fake)
    toggles = page.get_by_role("group", name="Kinds of messages")
    await toggles.get_by_role("button", name="tool results").click()
    await expect(page.locator(".message")).to_have_count(4)
    await toggles.get_by_role("button", name="reasoning").click()
    await expect(page.locator(".reasoning")).to_have_count(0)
    await toggles.get_by_role("button", name="tool calls").click()
    await expect(page.locator(".tool-call")).to_have_count(0)


async def test_a_conversation_is_searched_with_the_keyboard(page, fake):
    await opened(page, fake)
    await expect(page.locator(".message").first).to_be_visible()
    await page.keyboard.press("/")
    await page.keyboard.type("PARSE")
    status = page.locator(".conversation").get_by_role("status")
    await expect(status).to_have_text("8 found")
    await page.keyboard.press("Enter")
    await expect(status).to_have_text("1 of 8 found")
    await page.keyboard.press("Escape")
    await page.keyboard.press("n")
    await expect(status).to_have_text("2 of 8 found")
    await expect(page.locator("mark.found").first).to_have_text("parse")


async def test_a_match_far_into_a_long_text_is_brought_into_sight(page, fake):
    rollout = coding_rollout(ID)
    rollout.messages = [Message(role="user", content="line\n" * 20_000 + "needle\n" + "line\n" * 20_000)]
    rollout.serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}")
    await expect(page.get_by_role("button", name="Show all")).to_be_visible()
    await page.locator("[data-search]").fill("needle")
    await page.keyboard.press("Enter")
    await expect(page.locator(".text-row mark")).to_be_in_viewport()
    assert await page.locator(".text-row").count() < 100


async def test_the_prompts_on_both_sides_of_a_fork_are_compared_by_ids(page, fake):
    await opened(page, fake, "prompts")
    prompts = page.get_by_role("region", name="Prompts")
    await expect(prompts).to_contain_text("segment 1 began: compaction")
    await expect(prompts).to_contain_text("extends the first, id for id, by 35 tokens")
    await expect(prompts.locator(".diff-part.added")).to_contain_text("<|summary|>The parser was mended.")
    await prompts.get_by_role("button", name="Swap").click()
    await expect(prompts.locator(".diff-part.removed")).to_contain_text("<|summary|>")


async def test_an_unknown_rollout_is_a_message(page, fake, notes):  # type: ignore[no-untyped-def]
    notes.expected_statuses = {404}
    await page.goto(f"{fake.url}#/rollouts/none")
    await expect(page.get_by_role("alert").filter(has_text="not_found")).to_be_visible()
