"""The tabs of rollouts with sub-agents, of those with branches, and of parts of live sessions."""

from datetime import timedelta
from typing import Literal

import pytest
from playwright.async_api import expect

from api_schemas.rollouts import BranchPoint, RolloutState
from api_schemas.rollouts.sessions import MarkReason, MaskReason, RolloutKind, SessionInfo, TurnMark, Votes
from api_schemas.rollouts.tokens import RolloutMessages
from api_schemas.rollouts.trees import InvalidBecause, NodeParent, RolloutNodes
from api_schemas.trajectories import FinishReason, Message
from api_schemas.views.summaries import RolloutSummary, SummaryPage
from tests.support.browser.axe import violations
from tests.support.browser.trajectories import BEGAN, coding_rollout, summary
from tests.support.store.trees import WORK, bare, node

pytestmark = pytest.mark.browser

ID = "math-7.g12.s3"


def parent(node_id: str = "", turn: int = 0) -> NodeParent:
    return NodeParent(node_id=node_id, turn=turn, call_id="c", wave=0)


async def test_sub_agents_are_a_tree_that_leads_to_their_conversations(page, fake):
    coding_rollout(ID).serve(fake)
    nodes = bare(
        [
            node(ID, 1, parent=parent()),
            node(ID, 2, parent=parent(), agent="critic", valid=False, invalid_because=InvalidBecause.EMPTY),
            node(ID, 3, parent=parent(f"{ID}/1")),
        ]
    )
    fake.answer(f"GET /v1/rollouts/{ID}/nodes", RolloutNodes(rollout_id=ID, work=WORK, nodes=nodes))
    await page.goto(f"{fake.url}#/rollouts/{ID}?tab=subagents")
    rows = page.locator(".node-row")
    await expect(rows.locator("a")).to_have_text(["1 reader", "3 reader", "2 critic"])
    await expect(rows.nth(2)).to_contain_text("empty")
    await rows.nth(0).get_by_role("button").click()
    await expect(page.locator(".node-texts")).to_contain_text("page 1 says 4")
    fake.answer(
        f"GET /v1/rollouts/{ID}/messages",
        RolloutMessages(
            rollout_id=ID,
            node=3,
            messages=[Message(role="assistant", content="said by the sub-agent")],
            finish_reasons=[FinishReason.STOP],
        ),
    )
    await rows.nth(1).get_by_role("link").click()
    await expect(page.locator(".node-notice")).to_contain_text("sub-agent 3")
    await expect(page.locator(".message")).to_contain_text("said by the sub-agent")
    asked = [path for _, path, _ in fake.requests if "/messages" in path]
    assert asked == [f"/v1/rollouts/{ID}/messages?node=3"]
    await page.get_by_role("tab", name="Tokens").click()
    await expect(page.locator(".token-line").first).to_be_visible()
    tokens = [path for _, path, _ in fake.requests if "/tokens" in path]
    assert tokens
    assert all(path.endswith("&node=3") for path in tokens)


def sample(number: int, branch_of: tuple[int, int] | None = None, **changes: object) -> RolloutSummary:
    """Return a sample of a group; `branch_of` is another one's number and turn."""
    row = summary(f"math-7.g12.s{number}", run_id="math-7", group=12, **changes)
    if branch_of is None:
        return row
    point = BranchPoint(rollout_id=f"math-7.g12.s{branch_of[0]}", turn=branch_of[1])
    return row.model_copy(update={"branch_of": point})


async def test_the_branches_of_a_group_are_a_tree_whose_rows_are_links(page, fake):
    coding_rollout(ID).serve(fake)
    group = [
        sample(1, reward=0.0),
        sample(2, reward=0.25),
        sample(3, (1, 4), reward=1.0),
        sample(4, (3, 6), state=RolloutState.FAILED, reward=None),
        sample(5, (1, 2)),
        sample(6, (99, 1)),
    ]
    fake.answer("GET /v1/summaries", SummaryPage(rows=group))
    await page.goto(f"{fake.url}#/rollouts/{ID}?tab=branches")
    rows = page.locator(".branch-row")
    await expect(rows.locator("td:first-child")).to_have_text(
        [f"math-7.g12.s{number}" for number in (1, 5, 3, 4, 2, 6)]
    )
    widths = [await rows.nth(at).locator(".node-indent").evaluate("one => one.offsetWidth") for at in range(6)]
    assert widths == [0, 18, 18, 36, 0, 0]
    await expect(rows.locator("td:nth-child(4)")).to_have_text(["0", "1", "1", "\u2013", "0.25", "1"])
    await expect(page.locator(".branch-row[aria-current]")).to_contain_text(ID)
    begin = rows.nth(2).get_by_role("link", name="turn 4")
    await expect(begin).to_have_attribute("href", "#/rollouts/math-7.g12.s1?tab=tokens&turn=4")
    compare = rows.nth(2).get_by_role("link", name="Compare math-7.g12.s3 with math-7.g12.s1")
    await expect(compare).to_have_attribute("href", "#/compare?ids=math-7.g12.s1%2Cmath-7.g12.s3")
    schemes: list[Literal["dark", "light"]] = ["dark", "light"]
    for scheme in schemes:
        await page.emulate_media(color_scheme=scheme)
        assert await violations(page) == []
    await rows.nth(0).get_by_role("link").focus()
    coding_rollout("math-7.g12.s1").serve(fake)
    fake.answer("GET /v1/summaries", SummaryPage(rows=group))
    await page.keyboard.press("Enter")
    await expect(page.locator(".branch-row[aria-current]")).to_contain_text("math-7.g12.s1")


async def test_a_group_without_branches_has_no_tree(page, fake):
    coding_rollout(ID).serve(fake)
    fake.answer("GET /v1/summaries", SummaryPage(rows=[sample(number) for number in (2, 3, 4)]))
    await page.goto(f"{fake.url}#/rollouts/{ID}?tab=branches")
    await expect(page.locator(".neighbors")).to_contain_text("sample 2 of 3")
    await expect(page.get_by_role("tab", name="Branches")).to_have_count(0)


async def test_the_turns_of_a_session_have_their_votes_everywhere(page, fake):
    rollout = coding_rollout(ID)
    rollout.changes = {
        "kind": RolloutKind.SESSION,
        "session": SessionInfo(
            session_id="chat 7", user="u-1", tenant="acme", opened_at=BEGAN - timedelta(hours=1), part=0
        ),
        "turn_marks": [
            TurnMark(turn=0, usable=True, value=1.0, reason=MarkReason.MAJORITY, votes=Votes(plus=3)),
            TurnMark(turn=1, usable=False, masked_because=MaskReason.NO_NEXT_STATE),
        ],
    }
    rollout.serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}?tab=session")
    table = page.get_by_role("table")
    await expect(table).to_contain_text("majority")
    await expect(table).to_contain_text("no next state")
    await expect(page.get_by_role("region", name="Session")).to_contain_text("chat 7")
    schemes: list[Literal["dark", "light"]] = ["dark", "light"]
    for scheme in schemes:
        await page.emulate_media(color_scheme=scheme)
        assert await violations(page) == []
    await page.get_by_role("tab", name="Conversation").click()
    await expect(page.locator(".message .vote")).to_have_text(["+1", "masked: no next state"])
    await page.get_by_role("tab", name="Tokens").click()
    await expect(page.locator(".turn-start")).to_have_count(2)
    turns = [await page.locator(".turn-start").nth(at).get_attribute("data-turn") for at in range(2)]
    assert turns == ["0 +1", "1 masked: no next state"]
    await expect(page.locator(".turn-start.vote-plus")).to_have_count(1)
