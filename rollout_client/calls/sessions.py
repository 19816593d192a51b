"""Live sessions for whoever runs an agent: open one, hand its URL and key to the agent, and say how answers were.

`open_session` returns a session whose key is known, even if an answer was lost on the way. Ids are any text and are
escaped in paths.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING
from urllib.parse import quote

from rollout_client import _wire as wire

if TYPE_CHECKING:
    from rollout_client._connection import Connection

PATH = "/v1/sessions"


class SessionCalls:
    """The calls of `RolloutClient` for live sessions; they raise `NotFoundError` if there is no such session."""

    _connection: Connection

    async def open_session(self, request: wire.SessionRequest | None = None) -> wire.OpenedSession:
        """Open a live session: an agent gets its `url` and `key` in place of a provider's.

        The key is shown only once: it is None if a session with the request's `session_id` was open before.

        Raises:
            InvalidRequestError: The request cannot be carried out as it is.
            ConflictError: The id was used with another body.
            UnavailableError: As many sessions are open as the service's settings allow.
        """
        request = request or wire.SessionRequest()
        while True:
            session_id = request.session_id or f"s-{uuid.uuid4().hex}"
            named = request.model_copy(update={"session_id": session_id})
            body = named.model_dump(mode="json", exclude_defaults=True)
            opened = await self._connection.call(wire.OpenedSession, "POST", PATH, body)
            if opened.key is not None or request.session_id is not None:
                return opened
            await self.end_session(session_id)  # an answer was lost, and the key with it

    async def session(self, session_id: str) -> wire.LiveSession:
        """Return a session in its present state, with its turns."""
        return await self._connection.call(wire.LiveSession, "GET", _path(session_id))

    async def session_page(self, *, cursor: str | None = None, limit: int = 100) -> wire.SessionPage:
        """Return a page of sessions without their turns, the newest first, with the counts of all."""
        params = {"limit": limit, "cursor": cursor}
        return await self._connection.call(wire.SessionPage, "GET", PATH, params=params)

    async def sessions(self) -> AsyncGenerator[wire.LiveSession]:
        """Yield all sessions without their turns, the newest first."""
        cursor: str | None = None
        while True:
            page = await self.session_page(cursor=cursor)
            for session in page.sessions:
                yield session
            if (cursor := page.next_cursor) is None:
                return

    async def end_session(self, session_id: str) -> wire.LiveSession:
        """End a session, so that its last turns are decided; a request to it is refused from now on."""
        return await self._connection.call(wire.LiveSession, "POST", f"{_path(session_id)}/end")

    async def feedback(
        self, session_id: str, value: float, *, turn: int | None = None, text: str | None = None
    ) -> wire.FeedbackAnswer:
        """Say how good an answer was, from -1 to 1; it wins over the judge.

        Without `turn` it is the last answer that was delivered. `text` is evidence for a hint.

        Raises:
            NotFoundError: There is no such session or turn.
            ConflictError: The turn has other feedback already.
        """
        feedback = wire.SessionFeedback(turn=turn, value=value, text=text)
        body = feedback.model_dump(mode="json", exclude_none=True)
        return await self._connection.call(wire.FeedbackAnswer, "POST", f"{_path(session_id)}/feedback", body)

    async def delete_session(self, session_id: str) -> wire.DeletedSessions:
        """Delete a session and all that was recorded of it, and return the parts that were leased before."""
        return await self._connection.call(wire.DeletedSessions, "DELETE", _path(session_id))

    async def delete_sessions(self, *, user: str, tenant: str | None = None) -> wire.DeletedSessions:
        """Delete all sessions of a user, and return the parts that were leased before.

        Raises:
            InvalidRequestError: Several tenants have a user of this name: name one.
        """
        params = {"user": user, "tenant": tenant}
        return await self._connection.call(wire.DeletedSessions, "DELETE", PATH, params=params)

    async def feedback_by_version(self) -> list[wire.FeedbackByVersion]:
        """Return how turns were judged, by the pool and the version of the weights that sampled them."""
        return await self._connection.call(list[wire.FeedbackByVersion], "GET", f"{PATH}/feedback")

    async def canaries(self) -> list[wire.Canary]:
        """Return which pools share their new sessions with a candidate."""
        return await self._connection.call(list[wire.Canary], "GET", f"{PATH}/canary")

    async def set_canary(self, canary: wire.Canary) -> wire.Canary:
        """Send a share of a pool's new sessions to the pool that serves a candidate.

        Raises:
            InvalidRequestError: There is no such pool, or the candidate is the pool itself.
        """
        return await self._connection.call(wire.Canary, "PUT", f"{PATH}/canary", canary)

    async def remove_canary(self, pool: str = "policy") -> None:
        """Send all new sessions of a pool to itself again; open ones stay where they began."""
        await self._connection.call(None, "DELETE", f"{PATH}/canary", params={"pool": pool})


def _path(session_id: str) -> str:
    return f"{PATH}/{quote(session_id, safe='')}"
