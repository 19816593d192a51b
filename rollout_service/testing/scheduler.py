"""The turns of a scripted engine: how long each takes, and the effect of aborts, pauses and weight updates.

A turn takes its time however many there are, or as long as simulated hardware needs. An abort ends a turn with the
tokens sampled so far, and the request that resumes it gets the others. A pause stops the clock. A turn knows the
versions that sampled it.
"""

import asyncio
import time
from contextlib import AsyncExitStack

import anyio

from rollout_service.base.signals import first_of
from rollout_service.testing.engine_turn import ChunkStream, EngineTurn, ScriptedRequest
from rollout_service.testing.hardware import Accelerator, Hardware
from rollout_service.testing.script import Reply, Script

_BASE_ID_LENGTH = 32  # the part of a request id that its attempts share


class TurnScheduler:
    """The turns that are being answered; a subclass speaks an engine's protocol."""

    def __init__(self, script: Script, *, latency: float, hardware: Hardware | None) -> None:
        self.latency = latency
        """Seconds per turn, without simulated hardware."""
        self.version = "default"
        self.paused = False
        self.accelerator = Accelerator(hardware) if hardware else None
        self._script = script
        self._turns: dict[str, EngineTurn] = {}
        self._interrupted: dict[tuple[str, int], Reply] = {}
        """The rest of each aborted turn, by the id that its request's attempts share, and the length so far."""
        self._resumed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return len(self._turns)

    async def _run(self, asked: ScriptedRequest, stream: ChunkStream | None = None) -> EngineTurn:
        """Answer a request; `stream` gets the tokens as they are sampled."""
        base_id, length = asked.rid[:_BASE_ID_LENGTH], len(asked.ids)
        # A request that resumes gets the rest, not the script's answer to a longer prompt.
        reply = self._interrupted.pop((base_id, length), None) or self._script.reply(asked.ids, asked.budget)
        turn = EngineTurn(asked, reply.part(0, asked.budget), stream=stream)
        self._turns[turn.rid] = turn
        try:
            await self._take_time(turn)
        finally:
            del self._turns[turn.rid]
            turn.ended.set()
        if turn.aborted:
            self._interrupted[base_id, length + turn.done] = reply.part(turn.done)
        return turn

    async def _take_time(self, turn: EngineTurn) -> None:
        ids = turn.asked.ids
        if self.accelerator is None:
            turn.seconds = self.latency if turn.reply.seconds is None else turn.reply.seconds
            await self._sample(turn)
            return
        async with AsyncExitStack() as stack:
            with turn.before_sampling:
                admission = await stack.enter_async_context(self.accelerator.admit(ids))
            if turn.before_sampling.cancelled_caught:
                return
            turn.cached_tokens = admission.cached_tokens
            turn.seconds = admission.seconds_per_token * len(turn.reply.ids)
            await self._sample(turn)
            self.accelerator.keep(admission, [*ids, *turn.reply.ids[: turn.done][:-1]])

    async def _sample(self, turn: EngineTurn) -> None:
        while not turn.aborted and (self._holds(turn) or turn.elapsed < turn.seconds):
            if self._holds(turn):
                await self._wait_for_resume(turn)
                continue
            turn.interrupted.clear()  # set by a pause that is over
            started = time.perf_counter()
            with anyio.move_on_after(turn.seconds_to_next()):
                await turn.interrupted.wait()
            before = turn.elapsed
            turn.elapsed = before + time.perf_counter() - started
            turn.done = int(min(1.0, turn.elapsed / turn.seconds) * len(turn.reply.ids))
            if 0 < len(turn.reply.ids) == turn.done:
                turn.aborted = False  # too late, as in real engines
            if turn.stream is not None and not turn.aborted:
                await turn.stream.advance(turn)
                turn.elapsed = before + time.perf_counter() - started
        if not turn.aborted:
            turn.done = len(turn.reply.ids)
            if turn.stream is not None:
                await turn.stream.advance(turn)

    def _holds(self, turn: EngineTurn) -> bool:
        return self.paused and not turn.ignores_pause

    async def _wait_for_resume(self, turn: EngineTurn) -> None:
        turn.interrupted.clear()
        turn.spans.append((self.version, turn.done))
        await first_of(self._resumed.wait, turn.interrupted.wait)

    def _abort_turns(self, rid_prefix: str) -> None:
        for turn in self._turns.values():
            if turn.rid.startswith(rid_prefix):
                turn.aborted = True
                turn.before_sampling.cancel()
                turn.interrupted.set()

    def _hold_turns(self) -> None:
        """Stop the clock of all turns until `_release_turns`."""
        self.paused = True
        for turn in self._turns.values():
            turn.interrupted.set()

    def _release_turns(self) -> None:
        self.paused = False
        self._resumed.set()
        self._resumed = asyncio.Event()
