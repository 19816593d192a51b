"""Whether the backends of a pool serve: probes, and what failed requests say about them.

Guarantees: a backend that stops answering leaves service within a few probes, and its open requests move; it
comes back after several good probes, with the pool's weights and pause state.
"""

from dataclasses import replace

import anyio
import structlog

from api_schemas.inference import BackendState
from rollout_service.inference.errors import BackendUnreachable, InferenceError
from rollout_service.inference.pool.backend_state import Member
from rollout_service.inference.pool.options import PoolOptions
from rollout_service.inference.pool.registry import Roster
from rollout_service.inference.pool.weights.control import Control

log = structlog.get_logger(__name__)


class Health:
    """Takes the backends of a roster out of service and brings them back."""

    def __init__(self, roster: Roster, control: Control, options: PoolOptions) -> None:
        self._roster = roster
        self._control = control
        self._options = options

    async def watch(self, member: Member) -> None:
        """Probe a backend for ever."""
        while True:
            await anyio.sleep(self._options.probe_interval)
            await self._probe(member)

    async def suspect(self, member: Member, error: InferenceError) -> None:
        """Decide whether a failed request means a failed backend: ask it, or count."""
        member.failed(error)
        if member.bad_in_a_row >= self._options.unhealthy_after:
            self._roster.take_out(member)
        elif isinstance(error, BackendUnreachable) and not member.being_checked:
            member.being_checked = True
            try:
                if await self._probe_error(member) is not None:
                    self._roster.take_out(member)
            finally:
                member.being_checked = False

    async def _probe(self, member: Member) -> None:
        error = await self._probe_error(member)
        if error is not None:
            member.failed(error)
            if member.bad_in_a_row >= self._options.unhealthy_after:
                self._roster.take_out(member)
            return
        member.good_in_a_row += 1
        if member.state is not BackendState.FAILED:
            return
        if member.good_in_a_row >= self._options.healthy_after:
            await self._bring_back(member)

    async def _probe_error(self, member: Member) -> Exception | None:
        try:
            with anyio.fail_after(self._options.probe_timeout):
                await member.backend.health(paused=self._roster.paused is not None)
        except (InferenceError, TimeoutError) as error:
            return error
        return None

    async def _bring_back(self, member: Member) -> None:
        """An engine that was away may have restarted: it gets the pool's weights before any request."""
        async with self._control.lock:
            try:
                info = await member.backend.model_info()
                version = await self._control.synchronise(member.backend, info.weight_version)
            except InferenceError as error:
                member.failed(error)
                return
            if member.state is BackendState.FAILED:
                member.bring_back(replace(info, weight_version=version, exports=member.info.exports))
                log.info(
                    "backend is back", backend_id=member.id, pool=self._roster.name, weight_version=version
                )
        self._roster.notify()
