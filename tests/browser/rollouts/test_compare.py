"""Two rollouts side by side."""

import pytest
from playwright.async_api import Page, expect

from api_schemas.views.summaries import SummaryPage
from tests.support.browser.axe import violations
from tests.support.browser.fake_service import FakeService
from tests.support.browser.trajectories import (
    CannedRollout,
    CannedSegment,
    Piece,
    coding_rollout,
    summary,
    words,
)

pytestmark = pytest.mark.browser

FIRST, SECOND = "math-7.g12.s3", "math-7.g12.s4"


async def opened(page: Page, fake: FakeService, *rollouts: CannedRollout, tab: str = "tokens") -> None:
    for rollout in rollouts:
        rollout.serve(fake)
    await page.goto(f"{fake.url}#/compare?ids={FIRST},{SECOND}&tab={tab}")


def long_rollout(rollout_id: str, word: str, reward: float) -> CannedRollout:
    start = words("the same words on every line\n" * 300)
    pieces = [*start, Piece(word.encode(), 0), *words("and more of them to follow\n" * 300)]
    return CannedRollout(rollout_id, [CannedSegment(pieces)], reward=reward)


async def test_the_first_token_that_differs_is_shown_on_both_sides(page, fake):
    first, second = long_rollout(FIRST, "left", 1.0), long_rollout(SECOND, "right", 0.0)
    await opened(page, fake, first, second)
    at = next(index for index, piece in enumerate(first.segments[0].pieces) if piece.turn == 0)
    await expect(page.get_by_text(f"The first token that differs is {at:,}.")).to_be_visible()
    await expect(page.locator(".t.differs")).to_have_text(["left", "right"])
    for side in range(2):
        await expect(page.locator(".t.differs").nth(side)).to_be_in_viewport()
    await expect(page.locator(".reward")).to_have_text(["1", "0"])


async def test_both_sides_scroll_together(page, fake):
    await opened(page, fake, long_rollout(FIRST, "left", 1.0), long_rollout(SECOND, "right", 0.0))
    await expect(page.locator(".t.differs")).to_have_count(2)
    boxes = page.locator(".token-lines")
    await boxes.nth(0).hover()
    await page.mouse.wheel(0, 700)
    await page.evaluate("new Promise((done) => setTimeout(done, 200))")
    tops = [await boxes.nth(side).evaluate("box => box.scrollTop") for side in range(2)]
    assert tops[0] == tops[1] > 0


async def test_conversations_differ_word_by_word(page, fake):
    second = coding_rollout(SECOND, answer="The slice ended one late; it is mended, and all 42 tests pass.\n")
    await opened(page, fake, coding_rollout(FIRST), second, tab="conversation")
    await expect(page.get_by_text("1 of 5 messages differ")).to_be_visible()
    await expect(page.locator("mark.removed")).to_have_text(["short"])
    await expect(page.locator("mark.added")).to_have_text(["late"])
    await page.get_by_label("what is the same too").check()
    await expect(page.locator(".pair")).to_have_count(5)


async def test_the_next_sample_of_the_group_takes_its_place(page, fake):
    for number in range(3, 6):
        coding_rollout(f"math-7.g12.s{number}").serve(fake)
    rows = [summary(f"math-7.g12.s{number}", run_id="math-7", group=12) for number in range(3, 6)]
    fake.answer("GET /v1/summaries", SummaryPage(rows=rows))
    await page.goto(f"{fake.url}#/compare?ids={FIRST},{SECOND}")
    first = page.locator(".compare-head").nth(0)
    await first.get_by_role("link", name="next").click()
    await expect(page).to_have_url(f"{fake.url}#/compare?ids=math-7.g12.s5%2C{SECOND}")
    await expect(page.get_by_text("No token differs.")).to_be_visible()


async def test_without_two_rollouts_it_says_how_to_choose_them(page, fake):
    await page.goto(f"{fake.url}#/compare?ids=a")
    await expect(page.get_by_text("Tick two rows")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("tab", ["tokens", "conversation"])
async def test_axe_finds_nothing_serious_side_by_side(page, fake, tab, scheme):
    await page.emulate_media(color_scheme=scheme)
    second = coding_rollout(SECOND, answer="The slice ended one late; it is mended.\n")
    await opened(page, fake, coding_rollout(FIRST), second, tab=tab)
    await expect(page.get_by_text("ended one late").first).to_be_visible()
    assert await violations(page) == []
