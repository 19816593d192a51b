"""A node that serves live sessions, without HTTP: real stores, recording and training, and an engine that echoes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup
from prometheus_client import CollectorRegistry

from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.contract import GenerateRequest, Generation, TokenSink
from rollout_service.engines.kinds.token_stream import as_one_chunk
from rollout_service.engines.serving.policies import PoolModel
from rollout_service.gateway.contract import ClientMessage, Dialect, ModelCall
from rollout_service.gateway.metrics import GatewayMetrics
from rollout_service.live.consent import MessageHashes
from rollout_service.live.detectors import Detectors
from rollout_service.live.metrics import LiveMetrics
from rollout_service.live.parts.deletion import SessionDeletion
from rollout_service.live.recorder import RecordingParts
from rollout_service.live.register import UserHashes
from rollout_service.live.serving.engines import SessionEngines
from rollout_service.live.sessions import LiveSessions
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.settings.http import GatewaySettings
from rollout_service.settings.live import LiveSettings
from rollout_service.store import Store
from tests.support.live.parts import LiveBench
from tests.support.samples import generation
from tests.unit.live.test_replay import RENDERER

CONTEXT = 100_000


class SaidBefore:
    """An engine that says what it was told to say."""

    paused = False
    in_service = True

    def __init__(self) -> None:
        self.says = ""

    def check(self, pool: str) -> None:
        """Serve every pool."""

    def connect(self, pool: str) -> tuple[PoolModel, SaidBefore]:
        """Return this engine for every pool."""
        _ = pool
        return PoolModel(RENDERER, CONTEXT), self

    async def generate(
        self, request: GenerateRequest, *, affinity: str | None = None, on_tokens: TokenSink | None = None
    ) -> Generation:
        """Say it."""
        _ = affinity
        ids = RENDERER.encode(f"{self.says}<|im_end|>")
        answer = generation(ids, prompt_tokens=len(request.input_ids), backend_id="engine")
        if on_tokens is not None:
            as_one_chunk(answer, on_tokens)
        return answer

    def release(self, affinity: str) -> None:
        """Do nothing."""


class CountedTasks:
    """A task group that can be waited for."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._left = 0
        self._changed = ChangeSignal()

    def start_soon(self, work: Callable[..., Awaitable[Any]], *args: Any) -> None:
        """Start a task."""
        self._left += 1
        self._tasks.start_soon(self._run, work, *args)

    async def _run(self, work: Callable[..., Awaitable[Any]], *args: Any) -> None:
        try:
            await work(*args)
        finally:
            self._left -= 1
            self._changed.notify()

    async def settled(self) -> None:
        """Wait until all tasks have ended."""
        while self._left:
            await self._changed.wait()


class LiveNode(LiveBench):
    """One node among those that share a store of runs."""

    def __init__(
        self, store: Store, live: SqliteLiveStore, folder: Path, settings: LiveSettings, tasks: TaskGroup
    ) -> None:
        super().__init__(store, live, folder.name)
        self.folder, self.settings = folder, settings
        self.engine = SaidBefore()
        self.users = UserHashes.load(folder / "salt")
        self.deletion = SessionDeletion(live, store)
        self._tasks = CountedTasks(tasks)
        self.start()

    def start(self) -> None:
        """Begin anew, as after a restart."""
        registry = CollectorRegistry()
        metrics = LiveMetrics(registry)
        tasks, changed = cast(TaskGroup, self._tasks), ChangeSignal()
        hashes = MessageHashes(self.users.message_key())
        self.sessions = LiveSessions(
            settings=self.settings,
            store=self.live,
            users=self.users,
            engines=SessionEngines(
                policies=self.engine,
                settings=self.settings,
                gateway=GatewaySettings(),
                tasks=tasks,
                metrics=GatewayMetrics(registry),
                live_metrics=metrics,
                changed=lambda: changed.next,
                url="http://gateway",
            ),
            recording=RecordingParts(self.live, Detectors({}), hashes, metrics, tasks, clock=lambda: self.now),
            deletion=self.deletion,
            choose_pool=lambda pool, _: pool,
            clock=lambda: self.now,
        )
        self.restart()

    async def ask(
        self,
        key: str,
        client_id: str,
        messages: Sequence[ClientMessage],
        answer: str,
        *,
        train: bool | None = None,
    ) -> bool:
        """Send a request that is answered with a text; return whether the turn was recorded."""
        session = await self.sessions.served.serve_key(key, client_id)
        self.engine.says = answer
        call = ModelCall(
            dialect=Dialect.CHAT,
            model="policy",
            messages=tuple(messages),
            train=train,
            fingerprint=uuid4().bytes,
        )
        made = await session.answer(call)
        with made.reading():
            await made.until_whole()
        if made.error is not None:
            raise made.error
        made.deliver()
        await self._tasks.settled()
        return not made.observer.unrecorded_because

    async def expire(self) -> None:
        """Close what is idle, and remove what need not be kept."""
        await self.sessions._expire()
        await self.live.prune(self.now, None)


@asynccontextmanager
async def live_node(folder: Path, store: Store, settings: LiveSettings) -> AsyncIterator[LiveNode]:
    """Run a node with its own state folder, whose name is the node's."""
    async with AsyncExitStack() as stack:
        await anyio.Path(folder).mkdir()
        live = await stack.enter_async_context(SqliteLiveStore(folder / "live.sqlite3"))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        yield LiveNode(store, live, folder, settings, tasks)
