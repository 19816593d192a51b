"""The tabs of rollouts with sub-agents, and of parts of live sessions."""

from datetime import timedelta
from typing import Literal

import pytest
from playwright.async_api import expect

from api_schemas.rollouts.sessions import MarkReason, MaskReason, RolloutKind, SessionInfo, TurnMark, Votes
from api_schemas.rollouts.tokens import RolloutMessages
from api_schemas.rollouts.trees import InvalidBecause, NodeParent, RolloutNodes
from api_schemas.trajectories import FinishReason, Message
from tests.support.browser.axe import violations
from tests.support.browser.trajectories import BEGAN, coding_rollout
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
