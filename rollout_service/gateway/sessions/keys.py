"""Which key names which rollout.

Only hashes of keys are kept, and looking one up takes the same time whether it is right or wrong. A key whose rollout
has ended is known as such for `REMEMBERED_SECONDS`, so that its program learns why.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256
from time import monotonic

from rollout_service.base.errors import UnauthorizedError
from rollout_service.gateway.errors import RolloutEndedError
from rollout_service.gateway.sessions.session import GatewaySession

REMEMBERED_SECONDS = 3_600.0
MAX_REMEMBERED = 100_000


class GatewaySessions:
    def __init__(self, *sessions: GatewaySession) -> None:
        self._open = {_hash(session.key): session for session in sessions}
        self._ended: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: GatewaySession) -> None:
        self._open[_hash(session.key)] = session

    def remove(self, session: GatewaySession) -> bool:
        """Return whether the session's key was valid."""
        digest = _hash(session.key)
        if self._open.pop(digest, None) is None:
            return False
        self._ended[digest] = monotonic()
        self._forget()
        return True

    def find(self, key: str) -> GatewaySession:
        """Return the session of a key.

        Raises:
            UnauthorizedError: No rollout has this key.
            RolloutEndedError: Its rollout has ended.
        """
        digest = _hash(key)
        if (session := self._open.get(digest)) is not None:
            return session
        if digest in self._ended:
            raise RolloutEndedError
        raise unknown_key()

    def _forget(self) -> None:
        oldest_kept = monotonic() - REMEMBERED_SECONDS
        while self._ended and (len(self._ended) > MAX_REMEMBERED or next(iter(self._ended.values())) < oldest_kept):
            self._ended.popitem(last=False)


def unknown_key() -> UnauthorizedError:
    return UnauthorizedError(
        "the key is missing or wrong", hint="Send the rollout's key where clients of this API send theirs."
    )


def _hash(key: str) -> bytes:
    return sha256(key.encode()).digest()
