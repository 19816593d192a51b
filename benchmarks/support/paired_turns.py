"""Turns of two conversations that take turns in one process: one saves its turns, the other does not.

The machine's noise reaches both alike, so the median difference shows tens of microseconds. The engine is a pause,
which leaves the event loop free for the work in the background.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import anyio

from api_schemas.rollouts import RolloutRequest, Sampling
from api_schemas.tasks import Task
from api_schemas.trajectories import FinishReason, Message
from rollout_service.engines.contract import GenerateRequest, Generation
from rollout_service.engines.serving.saved_turns import SavedTurn
from rollout_service.engines.serving.session import PolicySession
from rollout_service.engines.serving.turn_log import TurnLog
from rollout_service.engines.shipped import policy_folder
from rollout_service.observability.telemetry.metrics import Metrics
from rollout_service.pipeline.turn_writer import TurnWriter
from rollout_service.store.contract import Lease
from rollout_service.store.sqlite.store import SqliteStore
from rollout_service.tokens import ChatRenderer, Conversation

ENGINE_SECONDS = 0.004
SAMPLED_TOKENS = 60
TURNS = 60
"""The turns of a rollout; its prompts grow with them."""


class PausingEngine:
    """Answers after a pause."""

    def __init__(self, stop: int) -> None:
        self._ids = [*range(40, 40 + SAMPLED_TOKENS), stop]

    async def generate(self, request: GenerateRequest, *, affinity: str | None = None) -> Generation:
        """Return the same turn every time."""
        _ = affinity
        await anyio.sleep(ENGINE_SECONDS)
        count = len(self._ids)
        return Generation(
            output_ids=list(self._ids),
            logprobs=[-0.5] * count,
            versions=[1] * count,
            finish_reason=FinishReason.STOP,
            prompt_tokens=len(request.input_ids),
            cached_tokens=0,
            backend_id="pausing",
            engine_seconds=ENGINE_SECONDS,
        )


async def added_milliseconds(folder: Path, rollouts: int) -> float:
    """Return the median of what saving adds to a turn, over pairs of turns of this many rollouts."""
    renderer = ChatRenderer.load(str(policy_folder("calc-tuned")))
    stop = renderer.stop_token_ids[0]

    def session(turns: TurnLog | None) -> PolicySession:
        return PolicySession(
            Conversation(renderer, []),
            PausingEngine(stop),
            affinity="",
            sampling=Sampling(),
            stop_token_ids=(stop,),
            context_length=1_000_000,
            turns=turns,
        )

    differences: list[float] = []
    async with await SqliteStore.open(folder / "turns.sqlite3") as store:
        writer = TurnWriter(store, "here", Metrics())
        async with writer.running():
            for number in range(rollouts):
                await store.submit(RolloutRequest(rollout_id=f"r{number}", task=Task(environment="none")))
                [lease] = await store.claim("here", limit=1, lease_seconds=3_600)

                def save(turn: int, saved: SavedTurn, lease: Lease = lease) -> None:
                    writer.add(lease, turn, saved)

                differences += await _alternate(session(TurnLog(save=save)), session(None))
            await writer.flush()
            saved = len(await store.saved_turns(f"r{rollouts - 1}"))
            if saved != TURNS:
                raise SystemExit(f"{saved} of {TURNS} turns were saved")
    return statistics.median(differences) * 1e3


async def _alternate(saving: PolicySession, plain: PolicySession) -> list[float]:
    """Return by how many seconds each turn of the first takes longer than that of the second."""
    differences = []
    for number in range(TURNS):
        pair = {}
        for one in (saving, plain) if number % 2 else (plain, saving):
            message = Message(role="tool" if number else "user", content="the output of a command")
            begun = time.perf_counter()
            await one.respond([message], max_tokens=SAMPLED_TOKENS + 1)
            pair[one] = time.perf_counter() - begun
        differences.append(pair[saving] - pair[plain])
    return differences
