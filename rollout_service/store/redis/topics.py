"""Topics: a thread that receives changes from Redis, so that nothing polls.

A function in Redis publishes a change on the topics that it concerns (`lua/common.lua`), and Redis passes it on to
their subscribers: `owner:NAME` (work for a service, cancellations), `rollout:ID` and `run:ID`, `runs` (for whoever
advances them), `cluster` (nodes and engines), and `events`. A change of a rollout costs the same however many services
there are.

A subscriber receives every change in order. It may miss those before its subscription is confirmed or while the
connection is lost, and then receives None, which means: read everything again.
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import anyio
import redis

from rollout_service.base.errors import ServiceError, StoreError
from rollout_service.base.signals import MonotonicCounter
from rollout_service.store.jobs import StoreHealth
from rollout_service.store.redis import checks
from rollout_service.store.redis.config import RedisConfig
from rollout_service.store.redis.problems import explain

PING_SECONDS = 5.0
"""The silence after which Redis is asked whether it is still there."""
LINGER_SECONDS = 5.0
"""How long a topic stays subscribed after the last wait for it, since most waits are repeated."""
CONFIRM_SECONDS = 1.0
"""The longest wait for a subscription. A caller that goes on without it is woken once it is confirmed."""
_AT_ONCE = 500
"""The most topics in one command, and the most messages that are passed on together."""
_RETRY_SECONDS = 0.5

TopicListener = Callable[[bytes | None], None]
"""None means that some messages may be lost, so everything is to be looked at anew."""
Message = tuple[str, bytes | None]
"""A topic's name and message, None once the subscription is confirmed."""


@dataclass(slots=True, eq=False)
class _Topic:
    changes: MonotonicCounter
    confirmed: anyio.Event = field(default_factory=anyio.Event)
    listeners: list[TopicListener] = field(default_factory=list)
    watchers: int = 0
    end: asyncio.TimerHandle | None = None
    """Ends the subscription, unless somebody watches before."""


class TopicReader:
    """Passes on, on the event loop, what is published on the topics that somebody follows."""

    def __init__(
        self,
        config: RedisConfig,
        identity: checks.StoreIdentity,
        health: StoreHealth,
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._identity = identity
        self._health = health
        self._on_defect = on_defect
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._work, name="store-redis-topics", daemon=True)
        self._closing = threading.Event()
        self._is_moving = threading.Event()
        self._topics: dict[str, _Topic] = {}
        self._ticks = 0
        """The number of changes so far: counters are never below those of an earlier subscription."""
        self._orders: SimpleQueue[tuple[str, bool]] = SimpleQueue()
        """Orders to the thread: topics to subscribe to (True) or no longer (False)."""
        self._woken, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._subscribed: dict[str, None] = {}  # the thread's
        self._ending = Counter[str]()
        """How often the thread has asked to end a subscription, and has no answer."""
        self._client: redis.Redis | None = None
        self._connection: Any = None
        self._prefix = f"{config.root}:topic:"

    async def start(self, *, may_be_away: bool = False) -> None:
        """Connect; if the Redis may be away, as soon as it answers.

        Raises:
            StoreError: The Redis fails.
        """
        if may_be_away:
            self._started.set_result(None)
        self._thread.start()
        await self._started

    def listen(self, topic: str, listener: TopicListener) -> None:
        found = self._topics.get(topic) or self._subscribe(topic)
        found.watchers += 1
        found.listeners.append(listener)

    async def confirmed(self, topic: str) -> None:
        """Wait, but not for long if Redis does not answer, until a topic that is followed is subscribed to."""
        with anyio.move_on_after(CONFIRM_SECONDS):
            await self._topics[topic].confirmed.wait()

    @asynccontextmanager
    async def watching(self, topic: str) -> AsyncIterator[MonotonicCounter]:
        """Follow a topic in the block; the counter grows with every message, and whenever one may be lost."""
        found = self._topics.get(topic) or self._subscribe(topic)
        if found.end is not None:
            found.end.cancel()
            found.end = None
        found.watchers += 1
        try:
            await self.confirmed(topic)
            yield found.changes
        finally:
            found.watchers -= 1
            if not found.watchers and not self._closing.is_set():
                found.end = self._loop.call_later(LINGER_SECONDS, self._unsubscribe, topic)

    def changes(self, topic: str) -> int:
        """Return the counter of a topic; 0 if nobody has watched it lately."""
        found = self._topics.get(topic)
        return found.changes.value if found is not None else 0

    def look_anew(self) -> None:
        """Connect again, and have everybody look at everything: Redis may be another than before."""
        self._is_moving.set()
        self._interrupt()

    async def close(self) -> None:
        """End the thread; idempotent."""
        self._closing.set()
        for topic in self._topics.values():
            if topic.end is not None:
                topic.end.cancel()
        if self._thread.is_alive():
            self._interrupt()
            await anyio.to_thread.run_sync(self._thread.join)
        self._woken.close()
        self._waker.close()

    def _subscribe(self, topic: str) -> _Topic:
        found = self._topics[topic] = _Topic(MonotonicCounter(self._tick()))
        self._order(topic, True)
        return found

    def _unsubscribe(self, topic: str) -> None:
        del self._topics[topic]
        self._order(topic, False)

    def _order(self, topic: str, subscribe: bool) -> None:
        self._orders.put((topic, subscribe))
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):  # it is awake if there is no room, and has ended if it is closed
            self._waker.send(b"\0")

    def _tick(self) -> int:
        self._ticks += 1
        return self._ticks

    def _interrupt(self) -> None:
        """End the read that the thread waits in, so that closing takes no time."""
        self._wake()
        sock = getattr(self._connection, "_sock", None)
        if sock is not None:
            with suppress(OSError):  # it has ended by itself
                sock.shutdown(socket.SHUT_RDWR)

    # -- the thread --------------------------------------------------------------

    def _work(self) -> None:
        if not self._started.done():
            try:
                self._connect()
            except Exception as error:  # noqa: BLE001 - it is the caller's of `start`
                self._disconnect()
                self._post(self._started.set_exception, self._explained(error))
                return
            self._post(self._started.set_result, None)
        try:
            while not self._closing.is_set():
                self._follow()
        except BaseException as error:  # noqa: BLE001 - nobody sees a thread end
            self._post(self._on_defect, error)
        finally:
            self._disconnect()

    def _follow(self) -> None:
        """Pass messages on until the connection is lost, and wait a moment before the next."""
        try:
            if self._connection is None:
                self._connect()
                self._post(self._health.succeeded, "events")
            while not self._closing.is_set():
                self._take_orders()
                self._wait()
                if messages := list(self._messages()):
                    self._post(self._pass_on, messages)
        except (redis.RedisError, OSError, ServiceError, ValueError) as error:
            self._disconnect()
            if not self._closing.is_set() and not self._is_moving.is_set():
                self._post(self._health.failed, "events", self._explained(error))
                self._closing.wait(_RETRY_SECONDS)

    def _connect(self) -> None:
        """Connect, and subscribe to everything that was subscribed to before."""
        self._is_moving.clear()
        self._ending.clear()
        self._client = checks.connect(self._config, self._identity)
        self._connection = self._client.connection_pool.get_connection()
        if self._closing.is_set():  # `close` may have missed this connection
            raise StoreError("the store is closed")
        self._send("SSUBSCRIBE", list(self._subscribed))

    def _disconnect(self) -> None:
        client, self._client, self._connection = self._client, None, None
        if client is not None:
            client.close()

    def _take_orders(self) -> None:
        """Subscribe to topics, and end subscriptions, in the order in which this was asked for."""
        orders: list[tuple[str, bool]] = []
        while not self._orders.empty():
            orders.append(self._orders.get())
        # Before any is sent: those that cannot be sent now are subscribed to by the next connection.
        for topic, subscribe in orders:
            if subscribe:
                self._subscribed[topic] = None
            else:
                self._subscribed.pop(topic, None)
        for topic, subscribe in orders:
            if not subscribe:
                self._ending[topic] += 1
            self._send("SSUBSCRIBE" if subscribe else "SUNSUBSCRIBE", [topic])

    def _send(self, command: str, topics: Sequence[str]) -> None:
        for start in range(0, len(topics), _AT_ONCE):
            names = [self._prefix + topic for topic in topics[start : start + _AT_ONCE]]
            self._connection.send_command(command, *names)

    def _wait(self) -> None:
        """Wait for a message or an order; after a long silence, for Redis to say that it is there."""
        connection = self._connection
        if connection.can_read(0):
            return
        ready, _, _ = select.select([connection._sock, self._woken], [], [], PING_SECONDS)
        if self._woken in ready:
            self._woken.recv(_AT_ONCE)
        if not ready:
            connection.send_command("PING")
            if not connection.can_read(self._config.answer_seconds):
                raise redis.TimeoutError("it does not answer")

    def _messages(self) -> Iterator[Message]:
        for _ in range(_AT_ONCE):
            if not self._connection.can_read(0):
                return
            reply = self._connection.read_response()
            if isinstance(reply, Exception):
                raise reply
            if not isinstance(reply, list) or reply[0] not in (b"smessage", b"ssubscribe", b"sunsubscribe"):
                continue
            topic = reply[1].decode().removeprefix(self._prefix)
            if reply[0] != b"sunsubscribe":
                yield topic, reply[2] if reply[0] == b"smessage" else None
            elif self._ending[topic]:
                self._ending[topic] -= 1
            else:
                raise redis.ConnectionError("the cluster of Redis has moved the store's slot")

    def _explained(self, error: Exception) -> ServiceError:
        if isinstance(error, redis.RedisError | OSError):
            error = explain(error, self._config.address)
        if isinstance(error, ServiceError):
            return error
        return StoreError(f"the topics of the store cannot be read: {error}", hint="Report it with the log.")

    # -- on the event loop -------------------------------------------------------

    def _pass_on(self, messages: Sequence[Message]) -> None:
        for name, message in messages:
            topic = self._topics.get(name)
            if topic is None:
                continue
            if message is None:
                topic.confirmed.set()
            topic.changes.advance(self._tick())
            for listener in topic.listeners:
                listener(message)

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)
