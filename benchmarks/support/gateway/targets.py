"""What agents of `gateway.py` call: the engine itself, this project's gateway, and Agent Lightning's proxy.

Guarantee: what was captured is compared with what the engine sampled, id for id, once a round's rollouts have ended.
"""

from __future__ import annotations

import tempfile
import uuid
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Protocol

from common import HERE, Server, service, told_address
from support.gateway.agents import Access

from api_schemas.rollouts import RolloutRequest
from api_schemas.tasks import Limits, Task
from api_schemas.trajectories import Segment

TASK = Task(environment="math", instance={"question": "1+1", "answer": "2"})
LIMITS = Limits(max_turns=10_000, max_tokens=10_000_000, agent_seconds=900, rollout_seconds=1_200)


@dataclass(frozen=True, slots=True)
class Engine:
    """A scripted engine in a process of its own."""

    url: str
    record: Path
    """The file to which it writes the ids that it samples."""

    def sampled(self) -> Counter[bytes]:
        """Return the answers so far, as bytes of their ids."""
        ids = array("i", self.record.read_bytes())
        answers: Counter[bytes] = Counter()
        at = 0
        while at < len(ids):
            answers[ids[at + 1 : at + 1 + ids[at]].tobytes()] += 1
            at += 1 + ids[at]
        return answers


@asynccontextmanager
async def engine(folder: Path, latency: float) -> AsyncIterator[Engine]:
    address, record = folder / "engine-url", folder / "engine-ids"
    program = [str(HERE / "programs" / "gateway_engine.py"), "--latency", str(latency)]
    async with told_address([*program, "--record", str(record)], address) as url:
        yield Engine(url, record)


class Target(Protocol):
    """What agents call."""

    @property
    def cpu_seconds(self) -> float:
        """CPU time of what stands between agents and engine."""

    def open(self, count: int) -> AbstractAsyncContextManager[Sequence[Access]]:
        """Give agents access; what they have done is over when the block is left."""


class BareEngine:
    cpu_seconds = 0.0

    def __init__(self, url: str) -> None:
        self._access = Access(f"{url}/v1", "")

    @asynccontextmanager
    async def open(self, count: int) -> AsyncIterator[Sequence[Access]]:
        """Give agents access."""
        yield [self._access] * count


@dataclass(slots=True)
class OwnGateway:
    """This project's gateway, in a service of its own."""

    server: Server
    captured: Counter[bytes] = field(default_factory=Counter)
    """The sampled ids of all turns in the trajectories of ended rollouts."""
    longest: int = 0
    """The tokens of their longest segment."""

    @property
    def cpu_seconds(self) -> float:
        return self.server.cpu_seconds

    @asynccontextmanager
    async def open(self, count: int) -> AsyncIterator[Sequence[Access]]:
        """Begin a rollout for each agent, and take their trajectories at the end."""
        request = RolloutRequest(task=TASK, limits=LIMITS)
        async with AsyncExitStack() as stack:
            rollouts = [
                await stack.enter_async_context(
                    self.server.client.external_rollout(
                        request.model_copy(update={"rollout_id": f"r-{uuid.uuid4().hex}"})
                    )
                )
                for _ in range(count)
            ]
            yield [Access(f"{each.access.url}/v1", each.access.key) for each in rollouts]
            for rollout in rollouts:
                await rollout.end(1.0)
                trajectory = (await rollout.result()).trajectory
                if trajectory is None:
                    raise RuntimeError(f"rollout {rollout.rollout_id} has no trajectory")
                for segment in (*trajectory.segments, *trajectory.untrained):
                    self.captured.update(turns_of(segment))
                    self.longest = max(self.longest, len(segment.token_ids))


def turns_of(segment: Segment) -> list[bytes]:
    """Return the sampled ids of each turn of a segment."""
    pairs = zip(segment.turn_ids, segment.token_ids, strict=True)
    return [
        array("i", [token for _, token in group]).tobytes()
        for turn, group in groupby(pairs, key=itemgetter(0))
        if turn >= 0
    ]


def tokens_in(answers: Counter[bytes]) -> int:
    """Return how many ids there are in all."""
    return sum(len(ids) // array("i").itemsize * count for ids, count in answers.items())


@asynccontextmanager
async def own_gateway(folder: Path, engine: Engine) -> AsyncIterator[OwnGateway]:
    state = Path(tempfile.mkdtemp(prefix="service-", dir=folder))
    environment = HERE / "environments" / "echo"
    async with service(state, engine.url, workers=128, environment=environment) as server:
        yield OwnGateway(server)
