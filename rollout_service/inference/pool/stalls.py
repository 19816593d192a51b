"""What engines report about themselves: told to the router, and watched for calls that get nowhere.

Guarantees: a call that has been open for `stall_seconds`, in which the engine neither answered any call of the pool
nor reported any change in the work that it has, ends and goes on elsewhere. An engine that reports nothing at all is
left to its probes and time limits.
"""

from dataclasses import dataclass

import anyio

from rollout_service.inference.contract import BackendLoad
from rollout_service.inference.errors import BackendRejected, InferenceError
from rollout_service.inference.pool.backend_state import Member
from rollout_service.inference.pool.options import PoolOptions
from rollout_service.inference.pool.registry import Roster
from rollout_service.inference.routing import Router


@dataclass(slots=True)
class _Life:
    """The last sign of life of an engine."""

    served: int
    signature: str
    at: float


class Progress:
    """Asks the members of a pool how busy they are, as long as each is a member."""

    def __init__(self, roster: Roster, router: Router, options: PoolOptions) -> None:
        self._roster = roster
        self._router = router
        self._options = options

    async def watch(self, member: Member) -> None:
        """Follow one engine for ever, or until it turns out that it reports nothing."""
        life = _Life(member.served, "", member.clock())
        while True:
            try:
                load = await self._ask(member)
            except BackendRejected:
                return
            self._judge(member, life, load)
            await anyio.sleep(self._options.load_interval)

    async def _ask(self, member: Member) -> BackendLoad | None:
        try:
            with anyio.fail_after(self._options.probe_timeout):
                load = await member.backend.load()
        except BackendRejected:
            raise
        except (InferenceError, TimeoutError):
            return None
        if member.id in self._roster:
            self._router.observe(member.id, load)
        return load

    def _judge(self, member: Member, life: _Life, load: BackendLoad | None) -> None:
        now = member.clock()
        is_working = load is not None and load.running + load.waiting > 0
        if load is not None and is_working and load.signature != life.signature:
            life.signature, life.at = load.signature, now
        if member.served != life.served or self._roster.paused is not None:
            life.served, life.at = member.served, now
        patience = self._options.stall_seconds
        if now - life.at >= patience:
            member.drop_calls(f"reported no progress for {patience:g} s", older_than=patience)
