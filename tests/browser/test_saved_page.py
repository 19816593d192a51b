"""A saved rollout is looked at from a file: all of its page works, nothing is asked of anyone, and text stays text."""

from collections.abc import Mapping
from pathlib import Path

import anyio
import orjson
import pytest
from playwright.async_api import Page, expect
from pydantic import BaseModel

from api_schemas.rollouts import RolloutState
from api_schemas.rollouts.tokens import RolloutMessages
from api_schemas.rollouts.trees import RolloutNodes
from rollout_service.http.keyring import Role
from rollout_service.server.dashboard.saved_page import saved_page
from rollout_service.server.trajectories import outline, token_range
from tests.browser.rollouts.test_hostile_trajectory import ID as HOSTILE
from tests.browser.rollouts.test_hostile_trajectory import TEXT, hostile
from tests.support.browser.axe import violations
from tests.support.browser.fake_service import FakeService
from tests.support.browser.trajectories import CannedRollout, CannedSegment, coding_rollout, words
from tests.support.store import trees

pytestmark = pytest.mark.browser

ID = "math-7.g12.s3"
TABS = ["conversation", "tokens", "prompts", "raw"]


def save(rollout: CannedRollout, folder: Path, more: Mapping[str, BaseModel] | None = None) -> str:
    """Write the file, with `more` answers by their paths below the rollout's, and return its address."""
    service = FakeService()
    rollout.serve(service)
    answers = {request.removeprefix("GET /"): body for request, (_, body) in service.answers.items()}
    answers["about"] = orjson.dumps(
        {"rollout_id": rollout.rollout_id, "saved_at": "2026-03-05T12:00:00Z", "version": "0.1.0"}
    )
    path = f"v1/rollouts/{rollout.rollout_id}"
    trajectory = rollout.trajectory()
    for index, segment in enumerate(rollout.segments):
        count = len(segment.pieces)
        tokens = rollout.tokens(trajectory, index, 0, count)
        answers[f"{path}/tokens?segment={index}&start=0&count={count}"] = tokens.model_dump_json().encode()
    answers |= {f"{path}/{name}": answer.model_dump_json().encode() for name, answer in (more or {}).items()}
    file = folder / f"{rollout.rollout_id}.html"
    file.write_bytes(saved_page(f"Rollout {rollout.rollout_id}", answers))
    return file.as_uri()


@pytest.fixture
def requests(page: Page) -> list[str]:
    """Every request of the page, those for data too."""
    found: list[str] = []
    page.on("request", lambda request: found.append(request.url.partition("#")[0]))
    return found


async def test_the_whole_page_works_from_a_file(page, requests, tmp_path):
    url = save(coding_rollout(ID), tmp_path)
    await page.goto(url)
    await expect(page).to_have_title(f"Rollout {ID}")
    await expect(page.get_by_role("heading", level=1)).to_contain_text(ID)
    for text in ["completed", "finished", "41 tokens", "tests", "math-7 / 12"]:
        await expect(page.locator(".rollout-head")).to_contain_text(text)
    await expect(page.locator(".tl-bar.tone-engine").first).to_be_visible()
    await page.locator(".tl-bar.tone-tool").hover()
    await expect(page.locator(".timeline-details")).to_contain_text("sed -n 1,40p parse.py")
    await expect(page.locator(".message")).to_have_count(5)
    for name, shown in [("Tokens", ".token-line"), ("Prompts", ".diff-part.added"), ("Raw", ".text-row")]:
        await page.get_by_role("tab", name=name).click()
        await expect(page.locator(shown).first).to_be_visible()
    assert requests == [url], "nothing is loaded but the file"


async def test_what_needs_the_service_is_not_there(page, tmp_path):
    await page.goto(save(coding_rollout(ID), tmp_path))
    await expect(page.locator(".message")).to_have_count(5)
    await expect(page.get_by_role("button", name="Save as HTML")).to_have_count(0)
    links = await page.locator("a").evaluate_all("all => all.map((one) => one.getAttribute('href'))")
    assert set(links) <= {"#content", *[f"#/rollouts/{ID}?tab=tokens&turn={turn}" for turn in (0, 1)]}


async def test_a_turn_leads_to_its_tokens(page, tmp_path):
    await page.goto(save(coding_rollout(ID), tmp_path))
    await page.get_by_role("link", name="turn 1").click()
    await expect(page.locator(".token-facts")).to_contain_text("version 4")
    await page.go_back()
    await expect(page.locator(".message")).to_have_count(5)


async def test_a_segment_of_any_length_is_there(page, tmp_path):
    """The service answers with 20,000 tokens at most, and the file with all of a segment."""
    segments = [CannedSegment(words("a word and another " * 8_000, 0)), CannedSegment(words("the end", 1))]
    total = sum(len(segment.pieces) for segment in segments)
    assert total > 25_000
    await page.goto(f"{save(CannedRollout(ID, segments), tmp_path)}#/?tab=tokens")
    await expect(page.locator(".tokens [role=status]")).to_have_text(f"{total:,} tokens")


async def test_a_sub_agent_has_its_own_conversation_and_tokens(page, tmp_path):
    nodes = trees.rollout(ID).nodes
    answers: dict[str, BaseModel] = {"nodes": RolloutNodes(rollout_id=ID, nodes=trees.bare(nodes))}
    trajectory = nodes[1].trajectory
    answers["messages?node=2"] = RolloutMessages(
        rollout_id=ID, node=2, messages=trajectory.messages, finish_reasons=trajectory.finish_reasons
    )
    answers["outline?node=2"] = outline(trajectory, ID, 2, has_text=False)
    [segment] = trajectory.segments
    count = len(segment.token_ids)
    answers[f"tokens?segment=0&start=0&count={count}&node=2"] = token_range(segment, 0, 0, count, None)
    await page.goto(f"{save(coding_rollout(ID), tmp_path, answers)}#/?tab=subagents")
    await page.get_by_role("link", name="2 reader").click()
    await expect(page.locator(".message")).to_have_count(1)
    await expect(page.locator(".message")).to_contain_text("node 2")
    await page.get_by_role("tab", name="Tokens").click()
    await expect(page.locator(".tokens [role=status]")).to_have_text(f"{count} tokens")
    await page.get_by_role("link", name="agent's own").click()
    await expect(page.locator(".message")).to_have_count(5)


async def test_a_preview_that_forbids_storage_shows_the_page(page, tmp_path):
    """Mail programs and portals show attachments in a sandbox, in which a page has no origin of its own."""
    save(coding_rollout(ID), tmp_path)
    sandbox = {"content-security-policy": "sandbox allow-scripts"}
    address = "http://127.0.0.1/preview.html"
    await page.route(
        address,
        lambda route: route.fulfill(path=tmp_path / f"{ID}.html", headers=sandbox, content_type="text/html"),
    )
    await page.emulate_media(color_scheme="light")
    await page.goto(address)
    await expect(page.locator(".message")).to_have_count(5)
    await page.keyboard.press("t")
    await expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    await page.get_by_role("button", name="Timeline").click()
    await expect(page.locator(".timeline")).to_have_count(0)
    await page.get_by_role("tab", name="Tokens").click()
    await expect(page.locator(".token-line").first).to_be_visible()


async def test_what_the_service_did_not_have_is_said(page, tmp_path):
    await page.goto(f"{save(coding_rollout(ID), tmp_path)}#/?tab=subagents")
    await expect(page.get_by_role("alert")).to_contain_text("did not have this when the file was saved")


@pytest.mark.parametrize("tab", TABS)
async def test_attacks_stay_text(page, requests, tmp_path, tab):
    url = save(hostile(), tmp_path)
    await page.goto(f"{url}#/rollouts/{HOSTILE}?tab={tab}")
    await expect(page.get_by_role("tab", selected=True)).to_have_text(tab.title())
    await expect(page.locator(".trajectory")).to_contain_text("<script>" if tab != "prompts" else "same")
    assert await page.evaluate("window.hit") is None
    assert await page.locator("main script, main img, a[href^='javascript']").count() == 0
    scripts = await page.evaluate(
        "[...document.scripts].filter((one) => one.type !== 'application/json').map((one) => one.type)"
    )
    assert scripts == ["module"]
    assert requests == [url]


async def test_data_that_ends_scripts_and_begins_comments_comes_back(page, tmp_path):
    attack = f"</script><script>window.hit = 1</script><!--<script>{TEXT}</script>-->"
    rollout = hostile()
    rollout.changes |= {"notes": [attack], "metadata": {attack: attack}}
    await page.goto(save(rollout, tmp_path))
    await expect(page.locator(".notes")).to_contain_text("</script><script>window.hit = 1</script><!--<script>")
    read = await page.evaluate(
        "path => JSON.parse(document.querySelector(`script[data-path='${path}']`).textContent)",
        f"v1/rollouts/{HOSTILE}",
    )
    assert read["notes"] == [attack]
    assert read["metadata"] == {attack: attack}
    assert await page.evaluate("window.hit") is None


async def test_no_other_script_runs_and_nothing_is_sent(page, notes, fake, tmp_path):
    """Even what got into the document would run nothing and reach nobody."""
    await page.goto(save(coding_rollout(ID), tmp_path))
    await page.evaluate(
        """async (url) => {
          const inline = document.createElement("script");
          inline.textContent = "window.hit = 1";
          const other = Object.assign(document.createElement("script"), {src: `${url}dashboard/app.js`});
          const image = Object.assign(new Image(), {src: `${url}v1/image`});
          document.body.append(inline, other, image);
          await fetch(`${url}v1/leak`).catch(() => {});
          navigator.sendBeacon?.(`${url}v1/beacon`);
        }""",
        fake.url,
    )
    await page.wait_for_function("window.violations.length >= 4")
    assert await page.evaluate("window.hit") is None
    assert fake.requests == []
    directives = {one.split(" ")[0] for one in await page.evaluate("window.violations")}
    assert directives == {"script-src-elem", "img-src", "connect-src"}
    await page.evaluate("window.violations.length = 0")
    assert notes.problems, "the browser reports each to its console"
    notes.problems.clear()
    notes.hosts.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("tab", TABS)
async def test_the_file_can_be_used_by_all(page, tmp_path, scheme, tab):
    await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    await page.goto(f"{save(coding_rollout(ID), tmp_path)}#/?tab={tab}")
    await expect(page.get_by_role("tab", selected=True)).to_be_visible()
    await expect(page.locator(".timeline")).to_be_visible()
    await expect(page.locator("html")).to_have_attribute("data-theme", scheme)
    assert await violations(page) == []


async def test_the_button_saves_what_the_service_answers_with(page, fake, notes, tmp_path):
    notes.expected_statuses = {401}
    key = "a-key-of-a-reader"
    fake.keys = {key: Role.READ}
    coding_rollout(ID).serve(fake)
    fake.answer(f"GET /v1/rollouts/{ID}/page", ["what the service answers with"])
    await page.goto(f"{fake.url}#/rollouts/{ID}")
    await page.get_by_role("textbox", name="Key").fill(key)
    await page.get_by_role("button", name="Use it").click()
    async with page.expect_download() as started:
        await page.get_by_role("button", name="Save as HTML").click()
    download = await started.value
    assert download.suggested_filename == f"{ID}.html"
    assert "what the service answers with" in await anyio.Path(await download.path()).read_text()


async def test_a_page_that_cannot_be_saved_says_why(page, fake, notes):
    notes.expected_statuses = {404}
    coding_rollout(ID).serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}")
    await page.get_by_role("button", name="Save as HTML").click()
    head = page.locator(".rollout-head")
    await expect(head.get_by_role("alert")).to_contain_text(f"there is no /v1/rollouts/{ID}/page")
    await expect(page.get_by_role("button", name="Save as HTML")).to_be_enabled()


@pytest.mark.parametrize("state", [RolloutState.QUEUED, RolloutState.ROLLOUT])
async def test_a_rollout_under_way_cannot_be_saved(page, fake, notes, state):
    notes.expected_statuses = {404}
    rollout = coding_rollout(ID)
    rollout.changes = {"state": state, "finished_at": None, "reward": None}
    rollout.serve(fake)
    await page.goto(f"{fake.url}#/rollouts/{ID}")
    await expect(page.get_by_role("link", name="JSON")).to_be_visible()
    await expect(page.get_by_role("button", name="Save as HTML")).to_have_count(0)
