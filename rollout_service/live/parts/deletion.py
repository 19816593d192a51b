"""Deletes sessions, or a user, with everything that was made of them: turns, judgments, hints, parts in runs.

No byte of a session's texts stays in either store, in whatever state its group is; rollouts that have a part are ended
before they are erased; parts that a trainer may hold are named. A deletion that fails can be repeated.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import anyio
import structlog

from api_schemas.rollouts import Rollout
from api_schemas.sessions import DeletedSessions, LeasedPart
from rollout_service.base.errors import UnavailableError
from rollout_service.base.ids import SampleId
from rollout_service.live.contract import PartRecord
from rollout_service.live.sqlite.store import SqliteLiveStore
from rollout_service.store.contract import Store

log = structlog.get_logger(__name__)

CANCEL_SECONDS = 10.0
"""For a rollout under way to end."""


@dataclass(frozen=True, slots=True)
class SessionDeletion:
    live: SqliteLiveStore
    store: Store

    async def delete(self, *, session_id: str | None = None, user: str | None = None) -> DeletedSessions:
        """Remove a session, or all of a user by its hash; name the parts that had left the service.

        Raises:
            UnavailableError: A rollout that has a part does not end; nothing of it was removed yet.
            StoreError: A store failed. Repeat the deletion.
        """
        batches: dict[str, str] = {}
        # Before the sessions go, since a deletion that is cut off is repeated by their names.
        for name in await self.live.withdraw(session_id=session_id, user=user):
            batches |= await self._erase(await self.live.parts(session_id=name))
        left = await self._left_in_runs(user)
        batches |= await self._erase(left)
        deleted = await self.live.delete(session_id=session_id, user=user)
        # A user may have opened others meanwhile.
        batches |= await self._erase([part for part in deleted.parts if part.rollout_id not in batches])
        parts = [*deleted.parts, *left]
        leased = [
            LeasedPart(
                session_id=part.session_id,
                part=part.part,
                run_id=part.run_id,
                rollout_id=part.rollout_id,
                batch_id=batches[part.rollout_id],
            )
            for part in parts
            if part.rollout_id in batches
        ]
        log.info("sessions deleted", sessions=len(deleted.sessions), turns=deleted.turns, parts=len(parts))
        return DeletedSessions(
            sessions=len(deleted.sessions),
            turns=deleted.turns,
            undelivered=len(parts) - len(leased),
            leased=leased,
        )

    async def _erase(self, parts: Sequence[PartRecord]) -> Mapping[str, str]:
        names = [part.rollout_id for part in parts if part.rollout_id is not None]
        for name in names:
            await self._end(SampleId.parse(name))
        return await self.store.runs.erase(names) if names else {}

    async def _left_in_runs(self, user: str | None) -> list[PartRecord]:
        """Find the parts that runs have of a user's sessions which were removed before."""
        return [
            PartRecord(
                session_id=session.session_id,
                part=session.part,
                run_id=SampleId.parse(rollout_id).run,
                usable=(),
                rollout_id=rollout_id,
                closed_at=0.0,
            )
            for rollout_id in ([] if user is None else await self.store.runs.rollouts_of(user))
            async for rollout in self._rollouts(SampleId.parse(rollout_id))
            if (session := rollout.session) is not None
        ]

    async def _end(self, sample: SampleId) -> None:
        """End a sample's rollouts, so that they write nothing after the erasure."""
        async for rollout in self._rollouts(sample):
            if not rollout.state.terminal:
                await self._cancel(rollout.rollout_id)

    async def _rollouts(self, sample: SampleId) -> AsyncIterator[Rollout]:
        for retry in count():
            rollout = await self.store.get(str(replace(sample, retry=retry)))
            if rollout is None:
                return
            yield rollout

    async def _cancel(self, rollout_id: str) -> None:
        await self.store.cancel(rollout_id)
        with anyio.move_on_after(CANCEL_SECONDS):
            await self.store.wait_for_result(rollout_id)
            return
        raise UnavailableError(
            f"the rollout {rollout_id} has a part of a session that is to be deleted, and does not end",
            hint="Repeat the deletion.",
        )
