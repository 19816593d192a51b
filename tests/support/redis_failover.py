"""A primary and a replica of Redis, and an address that leads to one of them and can be moved to the other."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from dataclasses import replace as with_changes
from typing import Any

from rollout_service.store.redis import RedisConfig
from sandboxes.host.ports import free_port
from tests.support.redis_server import RedisServer, redis_server

SYNC_SECONDS = 30.0


class MovableAddress:
    """A port of this machine whose connections go to another port; moving it cuts them."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def move(self, target: int) -> None:
        """Lead all further connections elsewhere, and cut those that there are."""
        with self._lock:
            self._target = target
            cut, self._sockets = self._sockets, set()
        for each in cut:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut everything and listen no more."""
        self._listener.close()
        self.move(0)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            with self._lock:
                self._sockets |= {near, far}
            threading.Thread(target=self._relay, args=(near, far), daemon=True).start()

    def _relay(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            back = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
            back.start()
            self._pass_on(near, far)
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(65_536):
                target.sendall(piece)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@dataclass
class RedisPair:
    """Two servers; `replica` has what `primary` has, until it is cut off or takes over."""

    primary: RedisServer
    replica: RedisServer
    address: MovableAddress

    @property
    def url(self) -> str:
        """The URL that always leads to the one that serves."""
        return f"redis://127.0.0.1:{self.address.port}/0"

    def config(self, prefix: str, **changes: Any) -> RedisConfig:
        return with_changes(self.primary.config(prefix, **changes), url=self.url)

    def follow(self) -> None:
        """Have the replica follow the primary, and wait until it has everything."""
        self.replica.do("REPLICAOF", "127.0.0.1", self.primary.port)
        end = time.monotonic() + SYNC_SECONDS
        while self.primary.do("WAIT", 1, 100) < 1 or not self._is_linked():
            assert time.monotonic() < end, self.replica.log

    def cut_off(self) -> None:
        """Let the replica miss everything from now on, as one that lags behind does."""
        self.replica.do("REPLICAOF", "NO", "ONE")

    def fail_over(self) -> None:
        """Kill the primary, promote the replica, and move the address to it."""
        self.primary.kill()
        self.replica.do("REPLICAOF", "NO", "ONE")
        self.address.move(self.replica.port)

    def _is_linked(self) -> bool:
        with self.replica.client() as client:
            return bool(client.info("replication").get("master_link_status") == "up")


@contextmanager
def redis_pair() -> Iterator[RedisPair]:
    """Run a primary and a replica that has everything for the block."""
    at_once = {"repl-diskless-sync-delay": "0"}
    with (
        redis_server(port=free_port(), options=at_once) as primary,
        redis_server(port=free_port(), options=at_once) as replica,
    ):
        address = MovableAddress(primary.port)
        try:
            pair = RedisPair(primary, replica, address)
            pair.follow()
            yield pair
        finally:
            address.close()
