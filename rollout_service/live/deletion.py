"""Deletes sessions from the store. Guarantee: what had left it before is named, so that a trainer can act."""

from __future__ import annotations

from api_schemas.sessions import DeletedSessions, LeasedPart
from rollout_service.live.contract import LiveStore


class StoreDeletion:
    """Deletes sessions whose parts no run holds beside the store."""

    def __init__(self, store: LiveStore) -> None:
        self._store = store

    async def delete(self, *, session_id: str | None = None, user: str | None = None) -> DeletedSessions:
        """Remove a session, or all of a user by its hash, and return what rollouts had taken before."""
        deleted = await self._store.delete(session_id=session_id, user=user)
        taken = [part for part in deleted.parts if part.rollout_id is not None]
        return DeletedSessions(
            sessions=len(deleted.sessions),
            turns=deleted.turns,
            undelivered=len(deleted.parts) - len(taken),
            leased=[
                LeasedPart(
                    session_id=part.session_id,
                    part=part.part,
                    run_id=part.run_id,
                    rollout_id=part.rollout_id,
                    batch_id=None,
                )
                for part in taken
            ],
        )
