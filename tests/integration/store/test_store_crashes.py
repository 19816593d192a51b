"""After kill -9 of a database, or of processes that use it, every write reported as durable is still there, once."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from api_schemas.rollouts import RolloutState
from rollout_service.base.errors import StoreError
from rollout_service.store import Store
from rollout_service.store.redis import RedisConfig
from rollout_service.store.sqlite import SqliteStore
from tests.support.store.servers import redis_store

WRITER = """
import itertools, os, sys
import anyio
from api_schemas.rollouts import RolloutState
from rollout_service.base.errors import StoreError
from rollout_service.cluster.identity import is_gone
from rollout_service.store.redis import RedisConfig, RedisStore
from rollout_service.store.sqlite import SqliteStore
from tests.support.store.rollouts import completed, order

kind, place, about, owner = sys.argv[1:]

def acknowledge(*words):
    os.write(1, (" ".join(words) + "\\n").encode())

async def insist(call):
    while True:
        try:
            return await call()
        except StoreError:
            if kind == "sqlite":
                raise
            await anyio.sleep(0.01)

async def submit(store, numbers):
    for number in numbers:
        request = order(f"{owner}-{number}")
        await insist(lambda: store.submit(request))
        acknowledge("submitted", request.rollout_id)

async def finish(store):
    while True:
        for lease in await insist(lambda: store.claim(owner, limit=8, lease_seconds=1000)):
            await insist(lambda: store.advance(lease, owner, RolloutState.ROLLOUT))
            if await insist(lambda: store.finish(lease, owner, completed(lease))):
                acknowledge("finished", lease.rollout_id)
        await store.wait_for_work()

async def main():
    if kind == "redis":
        opened = RedisStore.open(RedisConfig(place, about), is_gone=is_gone)
    else:
        opened = SqliteStore.open(place, disk=about)
    async with await opened as store:
        if kind == "sqlite":
            await store.recover(owner)
        async with anyio.create_task_group() as group:
            numbers = itertools.count()
            for _ in range(4):
                group.start_soon(submit, store, numbers)
            group.start_soon(finish, store)

anyio.run(main)
"""


@dataclass
class Acknowledged:
    """The answers that writers got."""

    submitted: set[str] = field(default_factory=set)
    finished: list[str] = field(default_factory=list)

    def take(self, writer: subprocess.Popen[str], lines: int) -> None:
        """Read until a writer has reported so many writes."""
        while lines:
            line = writer.stdout.readline()
            assert line, "the writer ended"
            lines -= self.add(line)

    def take_and_kill(self, writer: subprocess.Popen[str], lines: int) -> None:
        """Kill a writer after so many reports, and read those that it had yet made."""
        self.take(writer, lines)
        writer.send_signal(signal.SIGKILL)
        for line in writer.stdout:
            self.add(line)
        assert writer.wait() == -signal.SIGKILL

    def add(self, line: str) -> bool:
        """Note a line of a writer; return whether it reports a write, and is none of the log's."""
        what, _, rollout_id = line.strip().partition(" ")
        if what == "submitted":
            self.submitted.add(rollout_id)
        elif what == "finished":
            self.finished.append(rollout_id)
        return what in ("submitted", "finished")

    async def check(self, store: Store) -> None:
        """Check that nothing acknowledged is missing, and that nothing ended twice."""
        for rollout_id in self.submitted:
            assert await store.get(rollout_id) is not None
        for rollout_id in self.finished:
            rollout = await store.get(rollout_id)
            assert (rollout.state, rollout.reward) == (RolloutState.COMPLETED, 1.0)
        events = await store.events(after=0, limit=10**6)
        assert [event.event_id for event in events] == list(range(1, len(events) + 1))
        ends = Counter(event.subject for event in events if event.data["state"] == "completed")
        assert set(ends.values()) <= {1}
        assert set(ends) >= set(self.finished)
        assert 0 < len(self.finished) == len(set(self.finished))


@contextmanager
def writer(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITER, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def redis_writer(config: RedisConfig, name: str):
    return writer("redis", config.url, config.prefix, name)


@pytest.mark.redis
async def test_every_acknowledged_write_survives_kill_9_of_redis_under_load(own_redis):
    config = own_redis.config()
    acknowledged = Acknowledged()
    with redis_writer(config, "a") as first, redis_writer(config, "b") as second:
        for _ in range(4):
            for process in (first, second):
                acknowledged.take(process, 100)
            own_redis.kill()
            own_redis.start()
        for process in (first, second):
            acknowledged.take(process, 100)
    async with redis_store(config) as store:
        await acknowledged.check(store)


@pytest.mark.redis
async def test_every_acknowledged_write_survives_kill_9_of_a_service(shared_redis):
    config = shared_redis.config()
    acknowledged = Acknowledged()
    with ExitStack() as stack:
        survivor = stack.enter_context(redis_writer(config, "survivor"))
        for number in range(3):
            with redis_writer(config, f"victim{number}") as victim:
                acknowledged.take_and_kill(victim, 100)
            acknowledged.take(survivor, 50)
    async with redis_store(config) as store:
        await acknowledged.check(store)


@pytest.mark.parametrize("disk", ["local", "network"])
async def test_every_acknowledged_write_to_a_file_survives_kill_9(tmp_path, disk):
    path = tmp_path / "state" / "store.sqlite3"
    acknowledged = Acknowledged()
    for number in range(3):
        with writer("sqlite", path, disk, f"w{number}") as process:
            acknowledged.take_and_kill(process, 300)
        async with await SqliteStore.open(path, disk=disk) as store:
            await acknowledged.check(store)


async def test_two_processes_never_share_a_file(tmp_path):
    path = tmp_path / "store.sqlite3"
    with writer("sqlite", path, "local", "w") as process:
        assert process.stdout.readline()
        with pytest.raises(StoreError, match=f"pid {process.pid}") as caught:
            await SqliteStore.open(path)
        assert "Stop that service" in caught.value.hint
    async with await SqliteStore.open(path) as store:
        assert sum((await store.counts()).values()) >= 1
