"""After kill -9 of Redis, or of the processes that share it, every write reported as durable is still there, once."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from api_schemas.rollouts import RolloutState
from rollout_service.cluster.identity import is_gone
from rollout_service.store.redis import RedisConfig, RedisStore

pytestmark = pytest.mark.redis

WRITER = """
import itertools, os, sys
import anyio
from api_schemas.rollouts import Rollout, RolloutRequest
from api_schemas.tasks import Task
from rollout_service.cluster.identity import is_gone
from rollout_service.base.errors import StoreError
from rollout_service.store.redis import RedisConfig, RedisStore

def acknowledge(*words):
    os.write(1, (" ".join(words) + "\\n").encode())

async def insist(call):
    while True:
        try:
            return await call()
        except StoreError:
            await anyio.sleep(0.01)

async def submit(store, numbers):
    for number in numbers:
        request = RolloutRequest(rollout_id=f"{sys.argv[3]}-{number}", task=Task(environment="calc"))
        await insist(lambda: store.submit(request))
        acknowledge("submitted", request.rollout_id)

async def finish(store):
    owner = sys.argv[3]
    while True:
        for lease in await insist(lambda: store.claim(owner, limit=8, lease_seconds=1000)):
            result = Rollout(rollout_id=lease.rollout_id, state="completed", reward=1.0, pool="policy",
                             task=lease.request.task, created_at=lease.created_at)
            if await insist(lambda: store.finish(lease, owner, result)):
                acknowledge("finished", lease.rollout_id)
        await store.wait_for_work()

async def main():
    async with await RedisStore.open(RedisConfig(sys.argv[1], sys.argv[2]), is_gone=is_gone) as store:
        async with anyio.create_task_group() as group:
            numbers = itertools.count()
            for _ in range(4):
                group.start_soon(submit, store, numbers)
            group.start_soon(finish, store)

anyio.run(main)
"""


@dataclass
class Acknowledged:
    """What writers were told."""

    submitted: set[str] = field(default_factory=set)
    finished: list[str] = field(default_factory=list)

    def take(self, writer: subprocess.Popen[str], lines: int) -> None:
        """Read until a writer has reported so many writes."""
        assert writer.stdout is not None
        while lines:
            line = writer.stdout.readline()
            assert line, "the writer ended"
            lines -= self.add(line)

    def add(self, line: str) -> bool:
        """Take a line; return whether it reports a write: others are the log's."""
        what, _, rollout_id = line.strip().partition(" ")
        if what == "submitted":
            self.submitted.add(rollout_id)
        elif what == "finished":
            self.finished.append(rollout_id)
        return what in ("submitted", "finished")


@contextmanager
def writer(config: RedisConfig, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WRITER, config.url, config.prefix, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def check(config: RedisConfig, acknowledged: Acknowledged) -> None:
    """Check that nothing acknowledged is missing, and that nothing ended twice."""
    async with await RedisStore.open(config, is_gone=is_gone) as store:
        for rollout_id in acknowledged.submitted:
            assert await store.get(rollout_id) is not None
        for rollout_id in acknowledged.finished:
            rollout = await store.get(rollout_id)
            assert (rollout.state, rollout.reward) == (RolloutState.COMPLETED, 1.0)
        events = await store.events(after=0, limit=10**6)
    assert [event.event_id for event in events] == list(range(1, len(events) + 1))
    ends = Counter(event.subject for event in events if event.data["state"] == "completed")
    assert set(ends.values()) <= {1}
    assert set(ends) >= set(acknowledged.finished)
    assert len(acknowledged.finished) == len(set(acknowledged.finished))


async def test_every_acknowledged_write_survives_kill_9_of_redis_under_load(own_redis):
    config = own_redis.config()
    acknowledged = Acknowledged()
    with writer(config, "a") as first, writer(config, "b") as second:
        for _ in range(4):
            for process in (first, second):
                acknowledged.take(process, 100)
            own_redis.kill()
            own_redis.start()
        for process in (first, second):
            acknowledged.take(process, 100)
    assert acknowledged.finished
    await check(config, acknowledged)


async def test_every_acknowledged_write_survives_kill_9_of_a_service(shared_redis):
    config = shared_redis.config()
    acknowledged = Acknowledged()
    with ExitStack() as stack:
        survivor = stack.enter_context(writer(config, "survivor"))
        for number in range(3):
            with writer(config, f"victim{number}") as victim:
                acknowledged.take(victim, 100)
                victim.send_signal(signal.SIGKILL)
                for line in victim.stdout or ():
                    acknowledged.add(line)
            acknowledged.take(survivor, 50)
    await check(config, acknowledged)
