"""The reader of a store's events: a thread that waits for them in Redis, so that nobody else has to ask.

Guarantees: after `start`, every listener gets every event once and in order, also those from before a lost connection.
If Redis has lost events (a failover to a replica that was behind), the listeners are asked to look anew, and reading
goes on after the newest event that is left.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import anyio
import redis
import structlog

from rollout_service.base.errors import ServiceError, StoreError
from rollout_service.base.signals import MonotonicCounter
from rollout_service.store.redis import checks
from rollout_service.store.redis.checks import FunctionLibrary
from rollout_service.store.redis.config import RedisConfig
from rollout_service.store.redis.problems import RedisHealth, explain

log = structlog.get_logger(__name__)

BLOCK_SECONDS = 2.0
"""How long one read waits for events; a Redis that is then silent for longer than it may be has stopped."""
_AT_ONCE = 1_000
_RETRY_SECONDS = 0.5
"""The wait before connecting again."""
_LOOK_SECONDS = 10.0
"""How old the size of Redis's memory may be, and the last look whether it still has the store."""


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """An event of the stream; `data` is the text of a JSON object."""

    event_id: int
    time: float
    """Unix seconds."""
    kind: str
    subject: str
    data: bytes


class EventCounter(MonotonicCounter):
    """The id of the newest event; it falls only if Redis has lost events."""

    def reset(self, value: int) -> None:
        """Set the counter, and wake everyone who waits."""
        self.value = value
        self._advanced.notify()


EventListener = Callable[[Sequence[StreamEvent]], None]


class EventReader:
    """Passes the events of all services on to listeners, on the event loop."""

    def __init__(
        self,
        config: RedisConfig,
        library: FunctionLibrary,
        identity: checks.StoreIdentity,
        health: RedisHealth,
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._library = library
        self._identity = identity
        self._health = health
        self._on_defect = on_defect
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._work, name="store-redis-events", daemon=True)
        self._closing = threading.Event()
        self._is_moving = threading.Event()
        self._client: redis.Redis | None = None
        self._last: StreamEvent | None = None
        """The event after which to read on; None: read from the start."""
        self._listeners: list[EventListener] = []
        self._looked_at = -_LOOK_SECONDS
        self.newest = EventCounter()
        """The id of the newest event."""
        self.used_memory = 0
        """The bytes of memory that Redis used a few seconds ago."""

    def listen(self, listener: EventListener) -> None:
        """Call a listener with all further events. An empty list means: some may be lost, look at everything anew."""
        self._listeners.append(listener)

    async def start(self) -> None:
        """Begin after the newest event that there is.

        Raises:
            StoreError: The Redis fails.
        """
        self._thread.start()
        await self._started

    def look_anew(self) -> None:
        """Connect again, and have all listeners look at everything: Redis may be another than before."""
        for listener in self._listeners:
            listener([])
        self._is_moving.set()
        _interrupt(self._client)

    async def close(self) -> None:
        """End the thread; idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            _interrupt(self._client)
            await anyio.to_thread.run_sync(self._thread.join)

    # -- the thread --------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._last = self._newest(self._connect())
        except Exception as error:  # noqa: BLE001 - it is the caller's of `start`
            self._disconnect()
            self._post(self._started.set_exception, self._explained(error))
            return
        self._post(self._begin, self._position)
        try:
            while not self._closing.is_set():
                self._read_or_wait()
        except BaseException as error:  # noqa: BLE001 - nobody sees a thread end
            self._post(self._on_defect, error)
        finally:
            self._disconnect()

    def _read_or_wait(self) -> None:
        try:
            client = self._client or self._reconnect()
            self._look(client)
            events = self._read(client)
        except (redis.RedisError, OSError, ServiceError, ValueError) as error:
            self._disconnect()
            if not self._closing.is_set() and not self._is_moving.is_set():
                self._post(self._health.failed, "events", self._explained(error))
                self._closing.wait(_RETRY_SECONDS)
            return
        if events:
            self._last = events[-1]
        self._post(self._pass_on, events, self._position)

    def _read(self, client: redis.Redis) -> list[StreamEvent]:
        key = f"{self._config.root}:events"
        block = int(BLOCK_SECONDS * 1_000)
        answer: Any = checks.execute(
            client, "XREAD", "COUNT", _AT_ONCE, "BLOCK", block, "STREAMS", key, f"{self._position}-0"
        )
        found = next(iter(answer.values())) if isinstance(answer, dict) else (answer or [(b"", [])])[0][1]
        return [decode_entry(entry) for entry in found]

    def _connect(self) -> redis.Redis:
        self._client = checks.connect(self._config, self._library, self._identity)
        if self._closing.is_set():  # `close` may have missed this connection
            raise StoreError("the store is closed")
        return self._client

    def _reconnect(self) -> redis.Redis:
        self._is_moving.clear()
        client = self._connect()
        if self._last is not None and not self._has(client, self._last):
            self._last = self._newest(client)
            self._post(self._start_anew, self._position)
        return client

    @property
    def _position(self) -> int:
        return self._last.event_id if self._last else 0

    def _has(self, client: redis.Redis, event: StreamEvent) -> bool:
        """Return whether Redis has this very event: a primary that was behind gives its id to another."""
        key, position = f"{self._config.root}:events", f"{event.event_id}-0"
        answer: Any = checks.execute(client, "XRANGE", key, position, position)
        return event in map(decode_entry, answer)

    def _newest(self, client: redis.Redis) -> StreamEvent | None:
        key = f"{self._config.root}:events"
        answer: Any = checks.execute(client, "XREVRANGE", key, "+", "-", "COUNT", 1)
        return decode_entry(answer[0]) if answer else None

    def _look(self, client: redis.Redis) -> None:
        """Look now and then whether Redis still has the store, and how much memory it uses."""
        if time.monotonic() - self._looked_at >= _LOOK_SECONDS:
            self._identity.check(checks.store_id(client, self._config), self._config)
            self.used_memory = int(checks.execute(client, "INFO", "memory")["used_memory"])
            self._looked_at = time.monotonic()

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _explained(self, error: Exception) -> ServiceError:
        if isinstance(error, redis.RedisError | OSError):
            error = explain(error, self._config.address)
        if isinstance(error, ServiceError):
            return error
        return StoreError(f"the events of the store cannot be read: {error}", hint="Report it with the log.")

    # -- on the event loop -------------------------------------------------------

    def _begin(self, newest: int) -> None:
        self.newest.advance(newest)
        self._started.set_result(None)

    def _pass_on(self, events: Sequence[StreamEvent], position: int) -> None:
        self._health.succeeded("events")
        if events:
            self.newest.advance(position)
            for listener in self._listeners:
                listener(events)
        elif self.newest.value > position:  # the number of an answer from before a failover
            self.newest.reset(position)

    def _start_anew(self, newest: int) -> None:
        log.warning(
            "Redis has lost events, as after a failover to a replica that was behind", newest_event=newest
        )
        self.newest.reset(newest)
        for listener in self._listeners:
            listener([])

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)


def decode_entry(entry: Any) -> StreamEvent:
    """Return the event of an entry of the stream, as redis-py reads it."""
    name, fields = entry
    return StreamEvent(
        event_id=int(name.split(b"-")[0]),
        time=float(fields[b"t"]),
        kind=fields[b"k"].decode(),
        subject=fields[b"s"].decode(),
        data=fields[b"d"],
    )


def _interrupt(client: redis.Redis | None) -> None:
    """End the read that a thread waits in, so that closing takes no time."""
    connection: Any = client.connection_pool if client is not None else None
    for used in list(getattr(connection, "_in_use_connections", ())):
        sock = getattr(used, "_sock", None)
        if sock is not None:
            with suppress(OSError):  # it has ended by itself
                sock.shutdown(socket.SHUT_RDWR)
