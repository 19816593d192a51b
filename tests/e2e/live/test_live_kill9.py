"""A service with live sessions is killed at random moments: each answer that a user got is trained on, once."""

import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import httpx
import pytest
from anyio.abc import Process
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.rollouts.sessions import MaskReason
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.runs.live import LiveDelivery
from api_schemas.sessions import SessionRequest
from rollout_client.client import GoneError, LeasedBatch, RolloutClient
from rollout_service.cli.server_child import running_child
from sandboxes.host.ports import free_port
from tests.support.live.child_service import END, SETTINGS, Echoes, Praise, RecordingEngine
from tests.support.samples import sampled_by_turn

pytestmark = pytest.mark.timeout(300)

USERS = 6
KILLS = 5
LONGEST_SECONDS = 1.5
"""A kill comes at a random moment within this time after the service is ready."""


ORDER = RunRequest(
    run_id="live",
    source=InlineTasks(tasks=[], open=True),
    live=LiveDelivery(close_turns=3, close_seconds=1, max_user_share=1.0, max_session_share=1.0),
    batch_size=1,
    group_size=1,
    filters=[],
)


@dataclass
class User:
    """A session whose user asks again until the answer is there."""

    session_id: str
    key: str
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    ended: anyio.Event = field(default_factory=anyio.Event)

    async def talk(self, http: httpx.AsyncClient, over: anyio.Event) -> None:
        while not over.is_set():
            self.messages.append({"role": "user", "content": f"{self.session_id}-{len(self.answers)}"})
            answer = await self._ask(http)
            self.answers.append(answer)
            self.messages.append({"role": "assistant", "content": answer})
        self.ended.set()

    async def _ask(self, http: httpx.AsyncClient) -> str:
        headers = {"authorization": f"Bearer {self.key}"}
        while True:
            try:
                answer = await http.post(
                    "/v1/chat/completions",
                    json={"model": "policy", "messages": self.messages},
                    headers=headers,
                )
            except httpx.TransportError:
                await anyio.sleep(0.05)  # until the service is there again
                continue
            if answer.status_code == 200:
                content: str = answer.json()["choices"][0]["message"]["content"]
                return content
            assert answer.status_code == 503, answer.text


@dataclass
class Service:
    """The command of a service, at one address over its kills."""

    folder: Path
    engine_url: str
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Process]:
        config = self.folder.with_name("live.toml")
        config.write_text(SETTINGS)
        flags = ["--config", str(config), "--engine", "none", "--port", str(self.port)]
        async with running_child(self.folder, [*flags, "--backend", self.engine_url]) as server:
            yield server.process


async def collect(client: RolloutClient, batches: dict[str, LeasedBatch]) -> None:
    """Lease and acknowledge; a batch whose acknowledgment was lost may come again."""
    run = client.open_run("live")
    while True:
        try:
            batch = await run.lease(timeout_seconds=5)
            if batch is not None:
                batches[batch.batch_id] = batch
                await batch.ack()
        except GoneError:
            return


async def test_each_answer_that_a_user_got_is_trained_on_once(tmp_path):
    draw = random.Random(seed := time.time_ns())
    print(f"{seed=}")  # noqa: T201 - shown if the test fails
    batches: dict[str, LeasedBatch] = {}
    async with RecordingEngine(Echoes(), latency=0.05) as engine, RecordingEngine(Praise()) as judge:
        service = Service(tmp_path / "state", engine.url)
        async with (
            RolloutClient(service.url, patience_seconds=120) as client,
            httpx.AsyncClient(base_url=service.url, timeout=60) as http,
            anyio.create_task_group() as tasks,
        ):
            users, over = await begin(service, client, judge.url), anyio.Event()
            tasks.start_soon(collect, client, batches)
            for user in users:
                tasks.start_soon(user.talk, http, over)
            for _ in range(KILLS):
                async with service.running() as process:
                    await anyio.sleep(draw.uniform(0, LONGEST_SECONDS))
                    process.kill()
                    await process.wait()
            async with service.running():
                with anyio.fail_after(60):
                    while sum(len(user.answers) for user in users) <= USERS * KILLS:  # a busy machine gave fewer
                        await anyio.sleep(0.05)
                over.set()
                await settle(client, users, batches)
            tasks.cancel_scope.cancel()
    check(users, batches)


async def begin(service: Service, client: RolloutClient, judge_url: str) -> list[User]:
    """Register the judge, create the run, and open the sessions."""
    async with service.running():
        await client.add_backend(BackendSpec(url=HttpUrl(judge_url), pool="judge"))
        await client.create_run(ORDER)
        opened = [
            await client.open_session(SessionRequest(session_id=f"s{number}", train=True)) for number in range(USERS)
        ]
    return [User(each.session.session_id, each.key or "") for each in opened]


async def settle(client: RolloutClient, users: list[User], batches: dict[str, LeasedBatch]) -> None:
    """Let the talks end, rate the last answers, and wait until everything is decided and delivered."""
    for user in users:
        await user.ended.wait()
        await client.feedback(user.session_id, 1.0)
        await client.end_session(user.session_id)
    with anyio.fail_after(60):
        while len(delivered(batches)) < sum(len(user.answers) for user in users):
            await anyio.sleep(0.1)
        while (await client.session_page()).counts.waiting:
            await anyio.sleep(0.1)
    counts = (await client.session_page()).counts
    assert counts.served == counts.delivered + sum(counts.dropped.values())
    assert counts.dropped.keys() <= {MaskReason.SUPERSEDED, MaskReason.UNDELIVERED}


def delivered(batches: dict[str, LeasedBatch]) -> list[tuple[str, str]]:
    """Return the session and the text of every answer that was trained on."""
    renderer = Echoes().renderer
    return [
        (rollout.session.session_id, renderer.decode(ids).removesuffix(END))
        for batch in list(batches.values())
        for group in batch.groups
        for rollout in [sample.rollout for sample in group.samples]
        if rollout.session is not None
        for ids in sampled_by_turn(rollout.trajectory).values()
    ]


def check(users: list[User], batches: dict[str, LeasedBatch]) -> None:
    got = Counter((user.session_id, answer) for user in users for answer in user.answers)
    assert max(got.values()) == 1, "each question is another, so each answer is"
    assert Counter(delivered(batches)) == got
