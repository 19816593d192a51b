"""The list of rollouts: filters in the address, pages, what is new, and the keyboard."""

from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.async_api import Page, expect
from starlette.requests import Request

from api_schemas.rollouts import RolloutState
from api_schemas.views.summaries import RolloutSummary, SummaryPage
from tests.support.browser.axe import violations
from tests.support.browser.fake_service import FakeService
from tests.support.browser.trajectories import BEGAN, summary

pytestmark = pytest.mark.browser


class Listed:
    """Many rollouts, newest first, which are answered in pages as the service does."""

    def __init__(self, fake: FakeService, count: int) -> None:
        self.rows = [self.row(number) for number in range(count)]
        fake.handlers["GET /v1/summaries"] = self.page
        self.fake = fake

    def row(self, number: int, **changes: object) -> RolloutSummary:
        created = BEGAN + timedelta(seconds=number)
        return summary(f"r-{number:05}", created_at=created, reward=number / 10, **changes)

    def add(self, number: int) -> None:
        self.rows.append(self.row(number))
        self.fake.emit("rollout.state", subject=f"r-{number:05}")

    def page(self, request: Request) -> SummaryPage:
        query = request.query_params
        rows = [row for row in reversed(self.rows) if row.state == query.get("state", row.state)]
        if "since" in query:
            rows = [row for row in rows if row.created_at >= datetime.fromisoformat(query["since"])]
        start = next((at for at, row in enumerate(rows) if row.rollout_id < query.get("cursor", "s")), len(rows))
        shown = rows[start : start + int(query["limit"])]
        more = start + len(shown) < len(rows)
        return SummaryPage(rows=shown, next_cursor=shown[-1].rollout_id if more else None, matching=len(rows))


def asked(fake: FakeService) -> dict[str, list[str]]:
    """Return the query of the last request for rows."""
    return parse_qs(urlsplit([path for _, path, _ in fake.requests if "/summaries" in path][-1]).query)


def first_shown(page: Page) -> object:
    return page.evaluate(
        """(() => {
            const box = document.querySelector(".rows");
            const top = box.getBoundingClientRect().top;
            const rows = [...document.querySelectorAll(".summary-table .row")];
            const seen = rows.filter((row) => row.getBoundingClientRect().bottom > top + 2)
                .sort((a, b) => a.getBoundingClientRect().top - b.getBoundingClientRect().top);
            return seen[0].querySelector("a").textContent;
        })()"""
    )


async def test_the_filters_are_the_services_and_stand_in_the_address(page, fake):
    listed = Listed(fake, 3)
    listed.rows[1] = listed.row(1, state=RolloutState.FAILED, error_code="tool_timeout")
    await page.goto(fake.url + "#/rollouts")
    await expect(page.locator(".summary-row")).to_have_count(3)
    await page.get_by_role("group", name="State").get_by_role("button", name="failed").click()
    await expect(page.locator(".summary-row")).to_have_count(1)
    await expect(page.locator(".summary-row")).to_contain_text("tool_timeout")
    await page.get_by_label("Run").fill("math-7")
    await page.get_by_label("Reward ≥").fill("0.5")
    await expect(page).to_have_url(fake.url + "#/rollouts?state=failed&run=math-7&reward_min=0.5")
    await expect(page.locator(".summary-row")).to_have_count(1)
    query = asked(fake)
    assert (query["state"], query["run"], query["reward_min"]) == (["failed"], ["math-7"], ["0.5"])
    await page.reload()
    await expect(page.get_by_label("Run")).to_have_value("math-7")
    await page.get_by_role("button", name="Clear").click()
    await expect(page.locator(".summary-row")).to_have_count(3)


async def test_states_have_their_counts(page, fake):
    Listed(fake, 1)
    await page.goto(fake.url + "#/rollouts")
    states = page.get_by_role("group", name="State")
    await expect(states.get_by_role("button", name="completed")).to_contain_text("98,122")
    await expect(states.get_by_role("button", name="all")).to_contain_text("99,658")


async def test_ten_thousand_rollouts_are_scrolled_with_few_rows_in_the_document(page, fake):
    Listed(fake, 10_000)
    await page.goto(fake.url + "#/rollouts")
    rows = page.locator(".summary-table .rows")
    await expect(page.locator(".list-head")).to_contain_text("of 10,000")
    for loaded in (400, 600, 800):
        await rows.evaluate("box => { box.scrollTop = box.scrollHeight; }")
        await expect(page.locator(".list-head")).to_contain_text(f"{loaded} loaded of 10,000")
    assert await page.locator(".row").count() < 100


async def test_the_list_is_current_although_the_service_shares_older_answers(page, fake):
    listed = Listed(fake, 3)
    ages: list[str | None] = []

    def shared(request: Request) -> SummaryPage:
        ages.append(request.headers.get("cache-control"))
        current = listed.page(request)
        if len(ages) == 2:  # made for another reader, before the rollout began
            return current.model_copy(update={"rows": current.rows[1:]})
        return current

    fake.handlers["GET /v1/summaries"] = shared
    await page.goto(fake.url + "#/rollouts")
    await expect(page.locator(".summary-row")).to_have_count(3)
    listed.add(3)
    await expect(page.locator(".summary-row")).to_have_count(4)
    assert ages == ["no-cache", "max-age=2", "max-age=2"]


async def test_the_last_quarter_of_an_hour_moves_on_though_nothing_happens(page, fake):
    listed = Listed(fake, 3)
    now = datetime.now(UTC)
    listed.rows = [
        row.model_copy(update={"created_at": now - timedelta(minutes=13 - n)}) for n, row in enumerate(listed.rows)
    ]
    await page.clock.install(time=now)
    await page.goto(fake.url + "#/rollouts?since=15m")
    await expect(page.locator(".summary-row")).to_have_count(3)
    await page.clock.fast_forward("03:30")
    await expect(page.locator(".summary-row")).to_have_count(1)
    assert datetime.fromisoformat(asked(fake)["since"][0]) > now - timedelta(minutes=13)


async def test_new_rows_appear_above_without_moving_what_is_read(page, fake):
    listed = Listed(fake, 300)
    await page.goto(fake.url + "#/rollouts")
    await expect(page.locator(".summary-row").first).to_contain_text("r-00299")
    rows = page.locator(".summary-table .rows")
    await rows.evaluate("box => { box.scrollTop = 60 * 30; }")
    await expect(page.get_by_text("r-00235", exact=True)).to_be_visible()
    before = await first_shown(page)
    for number in range(300, 310):
        listed.add(number)
    await expect(page.locator(".list-head")).to_contain_text("of 310")
    assert await first_shown(page) == before
    await rows.evaluate("box => { box.scrollTop = 0; }")
    await expect(page.get_by_text("r-00309", exact=True)).to_be_visible()


async def test_at_the_top_new_rows_and_changed_states_are_shown_at_once(page, fake):
    listed = Listed(fake, 5)
    listed.rows[4] = listed.row(4, state=RolloutState.ROLLOUT)
    await page.goto(fake.url + "#/rollouts")
    await expect(page.locator(".summary-row").first.locator(".badge")).to_have_text("rollout")
    listed.rows[4] = listed.row(4)
    listed.add(5)
    await expect(page.locator(".summary-row").first).to_contain_text("r-00005")
    await expect(page.locator(".summary-row").nth(1).locator(".badge")).to_have_text("completed")


async def test_rows_are_walked_opened_and_compared_with_keys(page, fake, notes):
    notes.expected_statuses = {404}  # for the trajectories to compare, if they are asked for before the end
    Listed(fake, 5)
    await page.goto(fake.url + "#/rollouts")
    await expect(page.locator(".summary-row")).to_have_count(5)
    for key in "jxjx":
        await page.keyboard.press(key)
    await expect(page.locator(".list-head")).to_contain_text("r-00004  ↔  r-00003")
    await page.keyboard.press("c")
    await expect(page).to_have_url(fake.url + "#/compare?ids=r-00004%2Cr-00003")


async def test_enter_opens_the_row(page, fake, notes):
    notes.expected_statuses = {404}
    Listed(fake, 5)
    await page.goto(fake.url + "#/rollouts")
    await expect(page.locator(".summary-row")).to_have_count(5)
    await page.keyboard.press("j")
    await page.keyboard.press("j")
    await page.keyboard.press("Enter")
    await expect(page).to_have_url(fake.url + "#/rollouts/r-00003")


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious_in_the_list(page, fake, scheme):
    Listed(fake, 100)
    await page.emulate_media(color_scheme=scheme)
    await page.goto(f"{fake.url}#/rollouts?state=completed")
    await expect(page.get_by_text("r-00099")).to_be_visible()
    assert await violations(page) == []
