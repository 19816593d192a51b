"""Remembers which texts of a conversation were not to be stored, so that no later turn stores them.

A client sends its whole history with each request, so a turn that agrees may bring the text of one that did not. Such
texts are known again by keyed hashes of messages and of their paragraphs, since clients edit and join messages. The key
is the node's salt, without which nothing can be read from them. Where some of them are not known, a turn is stored only
if its history is that of stored turns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import TypeVar

import anyio.to_thread

from rollout_service.gateway.capture import PlannedTurn
from rollout_service.gateway.capture.history import canonical
from rollout_service.gateway.capture.text_stream import SentAnswer
from rollout_service.gateway.contract import ClientMessage
from rollout_service.live.contract import DIGEST_BYTES, OptOuts

T = TypeVar("T")

MIN_PARAGRAPH = 16
"""Shorter ones say too little to be known again within other text."""
INLINE_CHARS = 65_536
"""More is read in a thread."""
_PARAGRAPHS = "\n\n"


class MessageHashes:
    """Keyed hashes of messages, whoever says them."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of_messages(self, messages: Iterable[ClientMessage]) -> frozenset[bytes]:
        """Leave out instructions, which are not part of a conversation."""
        return frozenset(
            digest
            for message in messages
            if message.role != "system"
            for digest in self._of(message.text, [(call.name, call.arguments) for call in message.calls])
        )

    def of_answer(self, sent: SentAnswer) -> frozenset[bytes]:
        """Hash an answer as its client may send it back."""
        return frozenset(self._of(sent.text, [(call.name, call.arguments) for call in sent.calls]))

    def _of(self, text: str, calls: Sequence[tuple[str, str]]) -> Iterator[bytes]:
        for piece in (text, *text.split(_PARAGRAPHS)):
            if (said := piece.strip()) and (piece is text or len(said) >= MIN_PARAGRAPH):
                yield self._digest(said)
        for name, arguments in calls:
            yield self._digest(f"{name}\0{canonical(arguments)}")

    def _digest(self, text: str) -> bytes:
        data = text.encode("utf-8", "surrogatepass")
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._key).digest()


@dataclass(slots=True)
class ConversationConsent:
    conversation: str
    """Its name in the store, for all sessions that go on with it."""
    hashes: MessageHashes
    refused: OptOuts
    inherited: Callable[[], Awaitable[OptOuts]] | None = None
    """Returns the opt-outs of conversations that this one continues, which may grow while both go on."""

    async def allows(self, planned: PlannedTurn) -> bool:
        """Return whether all of a turn may be stored, as far as earlier turns tell."""
        if self.inherited is not None:
            self.refused = self.refused.with_others(await self.inherited())
        if self.refused == OptOuts():
            return True
        new = new_messages(planned)
        if planned.match.has_foreign or not self.refused.digests.isdisjoint(await self._hashed(new)):
            return False
        return self.refused.is_complete or sum(message.role == "user" for message in new) <= 1

    async def refuse(self, messages: Sequence[ClientMessage]) -> OptOuts:
        """Note that messages are not to be stored, and return the opt-outs to remember."""
        return self._add(await self._hashed(messages))

    def refuse_answer(self, sent: SentAnswer) -> OptOuts:
        """Note that an answer is not to be stored, and return the opt-outs to remember."""
        return self._add(self.hashes.of_answer(sent))

    async def _hashed(self, messages: Sequence[ClientMessage]) -> frozenset[bytes]:
        return await read_all(messages, partial(self.hashes.of_messages, messages))

    def _add(self, digests: frozenset[bytes]) -> OptOuts:
        added = OptOuts(digests)
        self.refused = self.refused.with_others(added)
        return added


async def read_all(messages: Sequence[ClientMessage], read: Callable[[], T]) -> T:
    """Call a function that reads messages, in a thread if they are long."""
    chars = sum([len(each.text) + sum([len(call.arguments) for call in each.calls]) for each in messages])
    return read() if chars <= INLINE_CHARS else await anyio.to_thread.run_sync(read)


def new_messages(planned: PlannedTurn) -> Sequence[ClientMessage]:
    """Return the messages that no stored turn has."""
    return planned.messages[planned.match.begin :]
