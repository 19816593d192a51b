"""A trainer that goes from node to node, and records in ledgers what was delivered to it.

Run: ROLLOUT_KEY=... python benchmarks/programs/chaos_trainer.py FOLDER RUN_ID TURNS IN_FLIGHT URL...

It leases and acknowledges the batches of a run, and submits rollouts of its own, `IN_FLIGHT` at a time; each call goes
to a node drawn at random, and to another one if it fails. After SIGTERM it submits no more, and it ends once everything
that it submitted has been delivered and the run is over.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import anyio

from api_schemas.rollouts import Rollout, RolloutRequest
from api_schemas.tasks import Limits, Task
from rollout_client.client import (
    ClientRun,
    GoneError,
    LeasedBatch,
    RolloutClient,
    UnavailableError,
    UnreachableError,
)

T = TypeVar("T")

BATCHES, RESULTS = "batches.jsonl", "results.jsonl"
LEASE_SECONDS = 8.0
WAIT_SECONDS = 5.0
"""How long a node may hold a request that waits for something."""
ANSWER_SECONDS = 10.0
"""How long to wait for a node's answer before another one is asked: longer than it may hold the request."""
PAUSE_SECONDS = 0.1
STEP_SECONDS = 0.5
FORGOTTEN_SHARE = 0.1
"""The share of batches that are not acknowledged, as by a trainer that crashed: they come again."""


@dataclass(slots=True)
class Ledger:
    """A file of JSON lines, each on disk before the trainer goes on."""

    path: Path

    def write(self, **entry: object) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


@dataclass(slots=True)
class Trainer:
    """The two kinds of work, and the nodes that are asked for them."""

    clients: list[RolloutClient]
    run_id: str
    turns: int
    batches: Ledger
    results: Ledger
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """The numbers of the rollouts that are submitted; each has its own in its prompt."""
    is_ending: bool = False

    async def ask(self, call: Callable[[RolloutClient], Awaitable[T]]) -> T:
        """Ask one node after the other, until one answers in time."""
        while True:
            client = random.choice(self.clients)
            with anyio.move_on_after(ANSWER_SECONDS):
                try:
                    return await call(client)
                except (UnreachableError, UnavailableError):
                    await anyio.sleep(PAUSE_SECONDS)

    async def train(self) -> None:
        """Take batches until the run is over."""
        while True:
            try:
                leased = await self.ask(self._lease)
            except GoneError:
                return
            if leased is None:
                continue
            groups = [group.number for group in leased.groups]
            samples = [sample for group in leased.groups for sample in group.samples]
            self.batches.write(got=leased.batch_id, groups=groups, delivery=leased.batch.delivery)
            await anyio.sleep(random.uniform(0, STEP_SECONDS))
            if random.random() < FORGOTTEN_SHARE:
                continue
            await self._acknowledge(leased.batch_id)
            self.batches.write(
                acknowledged=leased.batch_id,
                groups=groups,
                rollouts=[sample.rollout.rollout_id for sample in samples],
                masked=sum(not sample.usable for sample in samples),
            )

    async def roll_out(self) -> None:
        """Run one rollout after the other, until it is time to end."""
        while not self.is_ending:
            number = next(self.numbers)
            request = RolloutRequest(
                rollout_id=f"r-{number}",
                task=Task(environment="echo", instance={"number": number}),
                limits=Limits(max_turns=self.turns, agent_seconds=1_800, rollout_seconds=3_600),
            )
            self.results.write(submitted=request.rollout_id, number=number)
            rollout = await self._result(request)
            self.results.write(
                result=rollout.rollout_id,
                state=rollout.state,
                turns=rollout.usage.turns,
                attempt=rollout.attempt,
                digest=digest(rollout),
            )

    async def _lease(self, client: RolloutClient) -> LeasedBatch | None:
        return await self._run(client).lease(timeout_seconds=WAIT_SECONDS, lease_seconds=LEASE_SECONDS)

    async def _acknowledge(self, batch_id: str) -> None:
        async def acknowledge(client: RolloutClient) -> None:
            await self._run(client).settle(batch_id, "ack")

        await self.ask(acknowledge)

    async def _result(self, request: RolloutRequest) -> Rollout:
        async def submit(client: RolloutClient) -> Rollout:
            return await client.submit(request, wait_seconds=WAIT_SECONDS)

        while True:
            rollout = await self.ask(submit)
            if rollout.state.terminal:
                return rollout

    def _run(self, client: RolloutClient) -> ClientRun:
        return client.open_run(self.run_id)

    async def end_on_signal(self) -> None:
        """Submit no more after SIGTERM."""
        with anyio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                self.is_ending = True


def digest(rollout: Rollout) -> str:
    """Return what tells two results apart."""
    return hashlib.sha256(rollout.model_dump_json().encode()).hexdigest()


async def main(folder: Path, run_id: str, turns: int, in_flight: int, urls: list[str]) -> None:
    """Work until the run is over and everything has been delivered."""
    key = os.environ["ROLLOUT_KEY"]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(RolloutClient(url, key, patience_seconds=0)) for url in urls]
        trainer = Trainer(clients, run_id, turns, Ledger(folder / BATCHES), Ledger(folder / RESULTS))
        async with anyio.create_task_group() as ending:
            ending.start_soon(trainer.end_on_signal)
            async with anyio.create_task_group() as work:
                work.start_soon(trainer.train)
                for _ in range(in_flight):
                    work.start_soon(trainer.roll_out)
            ending.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
