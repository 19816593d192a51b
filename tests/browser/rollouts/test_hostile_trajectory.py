"""Output that a model or a sandbox made up to harm its readers stays text, and keeps the page quick."""

import time

import pytest
from playwright.async_api import expect

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import RolloutState
from api_schemas.rollouts.steps import StepKind
from api_schemas.trajectories import Message, ToolCall
from tests.support.browser.axe import violations
from tests.support.browser.trajectories import CannedRollout, CannedSegment, Piece, coding_rollout, step

pytestmark = pytest.mark.browser

ID = "hostile"
ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg/onload=window.hit=1>",
    "javascript:window.hit=1",
    "</div></article><h1>Taken over</h1>",
    "${window.hit = 1} {{window.hit = 1}}",
    "right \u202e tfel \u2066 isolate \u2069",
    "zero\u200bwidth \ufeff bell \x07 escape \x1b[31m",
    "broken \ufffd\ufffd lone \udc80".encode("utf-16", "surrogatepass").decode("utf-16", "replace"),
]
TEXT = "\n".join(ATTACKS)


def hostile() -> CannedRollout:
    call = ToolCall(id=TEXT, name=TEXT, arguments={TEXT: TEXT}, raw=TEXT)
    broken = ToolCall(id="c", name=None, arguments=None, raw=TEXT, error="invalid_json")
    pieces = [Piece(part.encode(), 0) for attack in ATTACKS for part in (attack[:5], attack[5:], "\n")]
    return CannedRollout(
        ID,
        [CannedSegment([*pieces, Piece(b"\xff\xfe", 0), Piece(b"\x00", 0)])],
        messages=[
            Message(role="assistant", content=TEXT, reasoning=TEXT, tool_calls=[call, broken]),
            Message(role="tool", name=TEXT, tool_call_id="c", content=TEXT),
        ],
        steps=[step(StepKind.TOOL, 6.0, 2.0, TEXT, call="c", command=TEXT)],
        changes={
            "state": RolloutState.FAILED,
            "reward": None,
            "notes": [TEXT],
            "metadata": {"note": TEXT},
            "error": ErrorInfo(code="x", boundary=Boundary.SANDBOX, message=TEXT, hint=TEXT),
        },
    )


@pytest.mark.parametrize("tab", ["conversation", "tokens", "prompts", "raw"])
async def test_attacks_stay_text(page, fake, tab):
    hostile().serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}?tab={tab}")
    await expect(page.get_by_role("tab", selected=True)).to_have_text(tab.title())
    await expect(page.locator(".trajectory")).to_contain_text("<script>" if tab != "prompts" else "same")
    await page.locator(".tl-bar.tone-tool").hover()
    await expect(page.locator(".timeline-details")).to_contain_text("<svg/onload")
    assert await page.evaluate("window.hit") is None
    assert (
        await page.locator("main script, main img, main h1:has-text('Taken over'), main a[href^='javascript']").count()
        == 0
    )
    shown = await page.evaluate("document.body.innerText")
    assert not set(shown) & set("\u202e\u2066\u200b\ufeff\x07\x1b")


async def test_hidden_characters_become_marks(page, fake):
    hostile().serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}?tab=tokens")
    lines = page.locator(".token-lines")
    for mark in ["RLO", "LRI", "ZWSP", "BOM", "␇", "␛", "␀"]:
        await expect(lines.locator(".mark", has_text=mark).first).to_be_visible()
    await expect(lines.locator(".bytes", has_text="ff").first).to_be_visible()
    for hidden in await lines.locator(".t:has(.mark), .t:has(.bytes)").all():
        assert await hidden.evaluate("one => getComputedStyle(one).unicodeBidi") == "isolate"


@pytest.mark.parametrize("part", ["x", "\x1b", "\u202e", "<b>"], ids=["plain", "escapes", "overrides", "tags"])
async def test_a_line_of_a_megabyte_does_not_stop_the_page(page, fake, part):
    rollout = CannedRollout(
        ID,
        [CannedSegment([Piece(b"a", 0)])],
        messages=[Message(role="tool", content=part * (1_000_000 // len(part)))],
    )
    rollout.serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}?tab=conversation")
    await page.get_by_role("button", name="Show all").click()
    await expect(page.locator(".text-row").first).to_be_visible()
    began = time.monotonic()
    await page.locator(".text-window").evaluate("box => { box.scrollTop = box.scrollHeight / 2; }")
    await page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert time.monotonic() - began < 5, "the page answers"
    assert await page.locator(".text-row").count() < 100


async def test_a_token_of_a_megabyte_takes_one_line(page, fake):
    pieces = [Piece(b"before\n"), Piece(b"y" * 1_000_000, 0), Piece(b"\nafter")]
    CannedRollout(ID, [CannedSegment(pieces)]).serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}?tab=tokens")
    await expect(page.locator(".token-line")).to_have_count(3)
    assert len(await page.locator(".token-lines .t.m").inner_text()) < 500


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("tab", ["conversation", "tokens", "prompts", "subagents", "raw"])
async def test_the_page_can_be_used_by_all(page, fake, notes, scheme, tab):  # type: ignore[no-untyped-def]
    notes.expected_statuses = {404}
    await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    coding_rollout("r-1").serve(fake)
    await page.goto(f"{fake.url}#/rollouts/r-1?tab={tab}")
    await expect(page.get_by_role("tab", selected=True)).to_be_visible()
    await expect(page.locator(".timeline")).to_be_visible()
    if tab == "tokens":
        for name in ["Mask", "Log-probability", "Entropy", "Turn"]:
            await page.get_by_role("group", name="Color by").get_by_role("button", name=name).click()
            assert await violations(page) == []
    assert await violations(page) == []
