"""Tokens: their colors and what they mean, forks, search, jumps, and trajectories of any length."""

import re

import pytest
from playwright.async_api import Page, expect

from api_schemas.trajectories import ForkReason
from tests.support.browser.fake_service import FakeService
from tests.support.browser.trajectories import (
    CannedRollout,
    CannedSegment,
    Piece,
    coding_rollout,
    words,
)

pytestmark = pytest.mark.browser

ID = "math-7.g12.s3"


async def opened(page: Page, fake: FakeService, rollout: CannedRollout | None = None, query: str = "") -> None:
    (rollout or coding_rollout(ID)).serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}?tab=tokens{query}")
    await expect(page.locator(".token-line").first).to_be_visible()


def one_segment(pieces: list[Piece]) -> CannedRollout:
    return CannedRollout(ID, [CannedSegment(pieces)])


async def color_by(page: Page, name: str) -> None:
    await page.get_by_role("group", name="Color by").get_by_role("button", name=name).click()


async def drawn(page: Page) -> str:
    """Return the text of all lines in the document, in their order, as it is shown."""
    return await page.evaluate(
        """[...document.querySelectorAll(".token-line")]
            .sort((a, b) => parseFloat(a.style.top) - parseFloat(b.style.top))
            .map((line) => [...line.querySelectorAll(".t")].map((token) => token.textContent).join("")).join("\\n")"""
    )


async def test_every_token_is_drawn_once_and_in_order(page, fake):
    rollout = coding_rollout(ID)
    await opened(page, fake, rollout)
    await expect(page.locator(".tokens").get_by_role("status")).to_have_text("152 tokens")
    wanted = "".join(piece.content.decode() for one in rollout.segments for piece in one.pieces)
    assert (await drawn(page)).replace("\n", "").replace("⏎", "\n") == wanted


async def test_sampled_tokens_are_underlined_in_every_coloring(page, fake):
    await opened(page, fake)
    for name in ["Mask", "Log-probability", "Entropy", "Weights", "Turn", "Segment"]:
        await color_by(page, name)
        sampled = page.locator(".t.m", has_text="parser")
        await expect(sampled).to_have_css("text-decoration-line", "underline")
        await expect(page.locator(".t:not(.m)", has_text="program").first).to_have_css("text-decoration-line", "none")


async def test_the_legend_has_the_color_of_each_token(page, fake):
    await opened(page, fake)
    legend = page.get_by_role("list", name="Legend").last
    for name, words_of in [
        ("Weights", ["version 3", "version 4"]),
        ("Turn", ["turn 0", "turn 1"]),
        ("Segment", ["segment 0", "segment 1"]),
    ]:
        await color_by(page, name)
        await expect(legend).to_contain_text(words_of[0])
        colors = [
            await legend.locator("li", has_text=word)
            .locator(".t")
            .evaluate("mark => getComputedStyle(mark).backgroundColor")
            for word in words_of
        ]
        assert len(set(colors)) == 2
        used = await page.evaluate(
            "[...document.querySelectorAll('.token-lines .t.m')].map((one) => getComputedStyle(one).backgroundColor)"
        )
        assert set(used) == set(colors)


async def test_unlikely_tokens_stand_out_by_color_and_weight(page, fake):
    likely, unsure, unlikely = (
        Piece(text, 0, logprob) for text, logprob in [(b"sure", -0.001), (b"maybe", -1.0), (b"odd", -7.5)]
    )
    await opened(page, fake, one_segment([likely, unsure, unlikely]))
    await color_by(page, "Log-probability")
    await expect(page.locator(".token-lines .t", has_text="odd")).to_have_class(re.compile("lp5"))
    classes = [
        await page.locator(f".t:has-text('{word}')").last.get_attribute("class") for word in ("sure", "maybe", "odd")
    ]
    assert [re.findall(r"lp\d", str(one)) for one in classes] == [["lp0"], ["lp2"], ["lp5"]]
    await expect(page.locator(".token-lines .t", has_text="odd")).to_have_css("font-weight", "700")


async def test_what_is_known_of_a_token(page, fake):
    await opened(page, fake)
    await page.locator(".t.m", has_text="parser").hover()
    facts = page.locator(".token-facts")
    for text in ["1, sampled", "version 3", "20 70 61 72 73 65 72", "nats"]:
        await expect(facts).to_contain_text(text)
    before = await facts.locator("dd").first.inner_text()
    await page.locator(".token-lines").focus()
    await page.keyboard.press("ArrowRight")
    assert await facts.locator("dd").first.inner_text() != before


async def test_forks_are_bars_with_their_reason_and_what_is_shared_is_dimmed(page, fake):
    await opened(page, fake)
    bars = page.locator(".segment-bar")
    await expect(bars.nth(1)).to_contain_text("compaction · shares 38 tokens with segment 0")
    await expect(page.locator(".t.shared")).to_have_count(38)
    await page.get_by_label("without shared prefixes").check()
    await expect(page.locator(".t.shared")).to_have_count(0)
    assert "<|summary|>" in await drawn(page)


async def test_a_search_finds_text_that_spans_tokens(page, fake):
    await opened(page, fake, one_segment([Piece(b"nee"), Piece(b"dle", 0), Piece(b" hay "), Piece(b"NEEDLE")]))
    await page.keyboard.press("/")
    await page.keyboard.type("needle")
    await expect(page.locator(".tokens").get_by_role("status")).to_have_text("2 found")
    await expect(page.locator(".t.hit")).to_have_text(["nee", "dle", "NEEDLE"])
    await expect(page.locator(".t.here")).to_have_text("nee")
    await page.keyboard.press("Enter")
    await expect(page.locator(".t.here")).to_have_text("NEEDLE")


async def test_a_pattern_is_searched_as_it_is_written(page, fake):
    await opened(page, fake, one_segment([Piece(b"a+(b"), Piece(b"aab")]))
    await page.locator("[data-search]").fill("a+(b")
    await expect(page.locator(".t.hit")).to_have_text(["a+(b"])


async def test_jumps_to_turns_segments_and_unlikely_tokens(page, fake):
    pieces = []
    for turn in range(40):
        pieces += words(f"observation {turn} " + "of many words " * 40)
        pieces += [Piece(b"Answer", turn, -6.0), Piece(b" it\n", turn)]
    await opened(page, fake, one_segment(pieces))
    here = page.locator(".t.here")
    for _ in range(3):
        await page.keyboard.press("e")
    await expect(here).to_have_attribute("data-turn", "2")
    await expect(here).to_be_in_viewport()
    await page.keyboard.press("E")
    await expect(here).to_have_attribute("data-turn", "1")
    await page.get_by_role("button", name="Next unlikely token").click()
    await expect(here).to_have_attribute("data-turn", "2")


async def test_a_link_leads_to_a_turn(page, fake):
    pieces = [piece for turn in range(60) for piece in [*words("read " * 200), Piece(b"Said\n", turn)]]
    await opened(page, fake, one_segment(pieces), "&turn=51")
    await expect(page.locator(".t.here")).to_have_attribute("data-turn", "51")
    await expect(page.locator(".t.here")).to_be_in_viewport()


async def test_tokens_that_are_parts_of_a_character_are_shown_as_bytes(page, fake):
    sun = "日".encode()
    contents = [b"a", sun[:1], sun[1:], "é".encode(), b"\xff", b"z"]
    await opened(page, fake, one_segment([Piece(content, 0) for content in contents]))
    await expect(page.locator(".token-lines .t .bytes")).to_have_text(["e6", "97a5", "ff"])
    await page.locator(".token-lines .t", has_text="日").hover()
    await expect(page.locator(".token-facts")).to_contain_text("97 a5")


async def test_a_trajectory_without_a_tokenizer_shows_ids(page, fake):
    rollout = one_segment([Piece(b"abc"), Piece(b"xyz", 0)])
    rollout.has_text = False
    await opened(page, fake, rollout)
    assert (await drawn(page)).split() == [str(Piece(b"abc").id), str(Piece(b"xyz").id)]
    await expect(page.locator(".tokens")).to_contain_text("tokens are shown as ids")


async def test_a_hundred_thousand_tokens_are_read_with_few_of_them_in_the_document(page, fake):
    pieces = []
    for turn in range(100):
        pieces += [Piece(b"word%d " % (at % 1000)) for at in range(500)]
        pieces += [Piece(b"said%d " % at, turn, -0.1) for at in range(499)] + [Piece(b"end\n", turn, -4.0)]
    await opened(page, fake, one_segment(pieces))
    await expect(page.locator(".tokens").get_by_role("status")).to_have_text("100,000 tokens")
    lines = page.locator(".token-lines")
    most = 0
    for share in (0.25, 0.5, 0.75, 1.0):
        await lines.evaluate("(box, share) => { box.scrollTop = share * box.scrollHeight; }", share)
        await page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        most = max(most, await lines.locator("*").count())
    assert most < 3000
    await lines.evaluate("box => box.scrollIntoView({block: 'end'})")
    await expect(page.locator(".t", has_text="end").last).to_be_in_viewport()
    strip = page.get_by_role("slider")
    await strip.click(position={"x": 10, "y": 10})
    await expect(page.locator(".t.here")).to_be_in_viewport()
    assert int(str(await page.locator(".t.here").get_attribute("data-t"))) < 3000
    asked = [path for _, path, _ in fake.requests if "/tokens" in path]
    assert len(asked) == 6, "in ranges, each once"


async def test_the_columns_of_a_segment_hold_what_the_ranges_said(page, fake):
    await page.goto(fake.url)
    found = await page.evaluate(
        """async () => {
            const {SegmentTokens} = await import("./dashboard/lib/tokens/columns.js");
            const tokens = new SegmentTokens({index: 0, tokens: 5});
            tokens.add({start: 0, count: 2, ids: [7, 8], text: "ab", ends: [1, 2], mask: [[0, 2]], versions: [[-1, 2]],
                turns: [[-1, 2]], logprobs: [null, null]});
            tokens.add({start: 2, count: 3, ids: [9, 10, 11], text: "cde", ends: [1, 1, 3], partial: [0, 1],
                pieces: {0: "e6", 1: "97"},
                mask: [[1, 1], [0, 1], [1, 1]], versions: [[3, 1], [-1, 1], [2 ** 33, 1]],
                turns: [[0, 1], [-1, 1], [1, 1]], logprobs: [-0.5, null, -2]});
            let refused = "";
            try { tokens.add({start: 4, count: 1}); } catch (error) { refused = error.message; }
            return {ends: [...tokens.ends], at: [0, 1, 2, 3, 4].map((at) => tokens.tokenAt(at)),
                texts: [0, 1, 2, 3, 4].map((at) => tokens.textOf(at)),
                turns: [...tokens.turns], versions: [...tokens.versions], pieces: [...tokens.pieces], refused};
        }"""
    )
    assert found == {
        "ends": [1, 2, 3, 3, 5],
        "at": [0, 1, 2, 4, 4],
        "texts": ["a", "b", "c", "", "de"],
        "turns": [-1, -1, 0, -1, 1],
        "versions": [-1, -1, 3, -1, 2**33],
        "pieces": [[2, "e6"], [3, "97"]],
        "refused": "a range begins at 4, not at 5",
    }


@pytest.mark.parametrize(
    ("a", "b", "first"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2], [1, 2, 3], 2),
        ([1, 5, 3], [1, 6, 7, 3], 1),
        ([], [4], 0),
        ([9] * 8000, [8] * 8000, 0),
    ],
)
async def test_a_difference_rebuilds_both_lists(page, fake, a, b, first):
    await page.goto(fake.url)
    found = await page.evaluate(
        """async ([a, b]) => {
            const {difference} = await import("./dashboard/lib/tokens/difference.js");
            return difference(Int32Array.from(a), Int32Array.from(b));
        }""",
        [a, b],
    )
    assert found["first"] == first
    for side, other, whole in (("a", "added", a), ("b", "removed", b)):
        rebuilt = [value for part in found["parts"] if part["kind"] != other for value in whole[slice(*part[side])]]
        assert rebuilt == whole


async def test_a_shared_prefix_is_marked_where_segments_fork_twice(page, fake):
    start = words("one two three ")
    segments = [
        CannedSegment([*start, Piece(b"A", 0)]),
        CannedSegment([*start, Piece(b"B", 1)], ForkReason.BRANCH, 0, len(start)),
        CannedSegment([*start, Piece(b"C", 2)], ForkReason.HISTORY_EDITED, 1, len(start)),
    ]
    await opened(page, fake, CannedRollout(ID, segments, turns=3))
    await expect(page.locator(".segment-bar")).to_have_count(3)
    await expect(page.locator(".segment-bar").last).to_contain_text("history edited · shares 4 tokens with segment 1")
