"""The file of a rollout holds the answers of the API, and the command line and both clients save it."""

import gzip
import json
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.rollouts.trees import NodeDetail
from rollout_client.client import NotFoundError, RolloutClient
from rollout_client.sync import SyncRolloutClient
from rollout_service.cli import app
from rollout_service.store.sqlite import SqliteStore
from tests.support.api.server import filled_server
from tests.support.store.trees import order, rollout

TREE, PLAIN, FAILED, CANCELLED, WAITING = "r:tree", "r-plain", "r-failed", "r-cancelled", "waiting"
ERROR = ErrorInfo(code="image_missing", boundary=Boundary.SANDBOX, message="</script><!-- no image")
BLOCK = re.compile(r'<script type="application/json" data-path="([^"]*)">([^<]*)</script>')


async def fill(path: Path) -> None:
    """Write a store with a rollout of each kind, and one that waits."""
    requests: list[RolloutRequest] = [order(NodeDetail.TOKENS, TREE), order(NodeDetail.SUMMARY, PLAIN)]
    async with await SqliteStore.open(path) as store:
        for request in [*requests, order(rollout_id=FAILED)]:
            await store.submit(request)
        for lease in await store.claim("w", limit=3, lease_seconds=100):
            ended = rollout(lease.rollout_id)
            if lease.rollout_id == FAILED:
                lost = {"trajectory": None, "nodes": [], "reward": None, "error": ERROR}
                ended = rollout(FAILED, state=RolloutState.FAILED, **lost)
            assert await store.finish(lease, "w", ended)
        await store.submit(order(rollout_id=CANCELLED))
        await store.cancel(CANCELLED)
        await store.submit(order(rollout_id=WAITING))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with filled_server(tmp_path_factory.mktemp("saved"), fill) as url:
        yield url


def blocks(content: str) -> dict[str, Any]:
    """Return the answers in a file by their paths."""
    return {unescape(path): json.loads(text) for path, text in BLOCK.findall(content)}


@pytest.mark.parametrize("rollout_id", [TREE, PLAIN, FAILED, CANCELLED])
def test_each_answer_in_the_file_is_that_of_the_api(url, rollout_id):
    with httpx.Client(base_url=url, timeout=60) as http:
        found = blocks(http.get(f"/v1/rollouts/{rollout_id}/page").raise_for_status().text)
        about = found.pop("about")
        assert about["rollout_id"] == rollout_id
        [row] = found.pop("v1/summaries")["rows"]
        assert row in http.get("/v1/summaries", params={"text": rollout_id}).json()["rows"]
        for path, answer in found.items():
            assert http.get(f"/{path}").raise_for_status().json() == answer, path


def test_all_that_the_page_asks_for_is_in_the_file(url):
    path = f"v1/rollouts/{TREE}"
    own = [f"{path}/messages", f"{path}/outline", f"{path}/tokens?segment=0&start=0&count="]
    wanted = [path, f"{path}/steps", f"{path}/nodes", *own]
    wanted += [name + f"{'&' if '?' in name else '?'}node={number}" for name in own for number in (1, 2)]
    found = [re.sub(r"count=\d+", "count=", name) for name in blocks(read(url, TREE).text)]
    assert sorted(found) == sorted([*wanted, "about", "v1/summaries"])


@pytest.mark.parametrize("rollout_id", [FAILED, CANCELLED])
def test_a_rollout_without_a_trajectory_is_saved_without_one(url, rollout_id):
    found = blocks(read(url, rollout_id).text)
    path = f"v1/rollouts/{rollout_id}"
    assert sorted(found) == sorted([path, f"{path}/steps", f"{path}/nodes", "about", "v1/summaries"])


def read(url: str, rollout_id: str, status: int = 200, **headers: str) -> httpx.Response:
    answer = httpx.get(f"{url}/v1/rollouts/{rollout_id}/page", headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer


def test_a_browser_saves_the_file_and_would_run_nothing_of_it(url):
    headers = read(url, TREE).headers
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert headers["content-disposition"] == f'attachment; filename="{TREE}.html"'
    assert headers["content-security-policy"] == "sandbox"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


def test_it_is_compressed_for_those_who_accept_that(url):
    with httpx.stream("GET", f"{url}/v1/rollouts/{TREE}/page", timeout=60) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        content = b"".join(answer.iter_raw())
    plain = read(url, TREE, **{"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert len(content) < len(plain.content) / 2
    unpacked = blocks(gzip.decompress(content).decode())
    assert unpacked | {"about": None} == blocks(plain.text) | {"about": None}


@pytest.mark.parametrize(
    ("rollout_id", "detail"), [("unknown", "there is no rollout unknown"), (WAITING, "its state is queued")]
)
def test_what_has_not_ended_is_not_saved(url, rollout_id, detail):
    problem = read(url, rollout_id, 404).json()
    assert problem["code"] == "not_found"
    assert detail in problem["detail"]


async def test_both_clients_return_the_file(url):
    async with RolloutClient(url) as client:
        content = await client.saved_page(TREE)
        with pytest.raises(NotFoundError):
            await client.saved_page(WAITING)
    assert content.startswith(b"<!doctype html>")
    assert content.endswith(b"</html>\n")


def test_the_blocking_client_returns_the_file(url):
    with SyncRolloutClient(url) as client:
        assert blocks(client.saved_page(TREE).decode()).keys() == blocks(read(url, TREE).text).keys()


def test_show_saves_the_file_beside_what_it_prints(url, tmp_path):
    file = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["show", TREE, "--html", str(file), "--url", url])
    assert done.exit_code == 0, done.output
    assert f"rollout {TREE}: completed" in done.stdout
    assert "Open it in a browser." in done.stderr
    assert f"v1/rollouts/{TREE}" in blocks(file.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("name", "rollout_id", "problem"),
    [
        ("page.html", WAITING, "Wait until the rollout has ended"),
        ("none/page.html", TREE, "cannot be written"),
    ],
)
def test_show_leaves_no_file_when_it_fails(url, tmp_path, name, rollout_id, problem):
    done = CliRunner().invoke(app, ["show", rollout_id, "--html", str(tmp_path / name), "--url", url])
    assert done.exit_code == 1
    assert problem in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []
