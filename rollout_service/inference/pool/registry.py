"""The backends of one pool, which of them may be used, and word to those who wait for one."""

from collections.abc import Callable, Iterator, Sequence

import anyio
import structlog

from api_schemas.inference import BackendState, BackendView, PauseMode
from rollout_service.inference.errors import BackendRejected, UnknownBackend
from rollout_service.inference.pool.backend_state import Member

log = structlog.get_logger(__name__)


class Roster:
    """The members of a pool in the order of their registration, and its pause.

    Args:
        name: of the pool.
        on_leave: told the id of each backend that leaves service, whose KV is then lost or of no use.
        on_change: called at every change of a member or of the pause.
    """

    def __init__(self, name: str, on_leave: Callable[[str], None], on_change: Callable[[], None]) -> None:
        self.name = name
        self._paused: PauseMode | None = None
        self.held = 0
        """Requests that wait for a change."""
        self._on_leave = on_leave
        self._on_change = on_change
        self._members: dict[str, Member] = {}
        self._changed = anyio.Event()
        self._vocabularies: set[int | None] = set()
        """The sizes of all that were ever served."""

    @property
    def paused(self) -> PauseMode | None:
        """How the pool was paused, while it is; setting it is a change that all who wait are told of."""
        return self._paused

    @paused.setter
    def paused(self, mode: PauseMode | None) -> None:
        self._paused = mode
        self.notify()

    def __contains__(self, backend_id: object) -> bool:
        return backend_id in self._members

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, backend_id: str) -> Member:
        """The member of that id.

        Raises:
            UnknownBackend: there is none.
        """
        if backend_id not in self._members:
            raise UnknownBackend(
                f"pool {self.name!r} has no backend {backend_id!r}", hint="GET /v1/backends lists them"
            )
        return self._members[backend_id]

    def get(self, backend_id: str) -> Member | None:
        """The member of that id, if there is one."""
        return self._members.get(backend_id)

    def ready(self) -> list[Member]:
        """Those that may be given a request now; none during a pause."""
        if self._paused is not None:
            return []
        return [member for member in self._members.values() if member.state is BackendState.READY]

    def views(self) -> list[BackendView]:
        """The backends and how they are doing."""
        return [self.view(member) for member in self._members.values()]

    def view(self, member: Member) -> BackendView:
        """A backend as the API shows it."""
        return member.view(self.name, paused=self.paused is not None)

    def add(self, member: Member) -> None:
        """Take a member in; the same again changes nothing."""
        self._members[member.id] = member
        self._vocabularies.add(member.info.vocab_size)
        self.notify()

    def remove(self, backend_id: str) -> Member:
        """Take a backend out for good; raises UnknownBackend."""
        member = self[backend_id]
        del self._members[backend_id]
        self._left(member)
        return member

    def take_out(self, member: Member) -> None:
        """Out of service, until its probes succeed again."""
        if member.state is BackendState.READY:
            log.warning(
                "backend lost",
                backend_id=member.id,
                pool=self.name,
                error=member.last_error,
                in_flight=member.in_flight,
            )
        member.take_out()
        self._left(member)

    def drain(self, backend_id: str) -> Member:
        """Give a backend nothing new; raises UnknownBackend."""
        member = self[backend_id]
        member.state = BackendState.DRAINING
        self._left(member)
        return member

    def clear(self) -> list[Member]:
        """Take all out for good."""
        return [self.remove(backend_id) for backend_id in list(self._members)]

    def notify(self) -> None:
        """Wake those who wait for a change."""
        self._changed.set()
        self._changed = anyio.Event()
        self._on_change()

    async def changed(self) -> None:
        """Wait for the next change of a member or of the pause."""
        self.held += 1
        try:
            await self._changed.wait()
        finally:
            self.held -= 1

    def refuse_other_vocabulary(self, backend_id: str, vocab_size: int | None) -> None:
        """Keep out a backend that serves another vocabulary than the members; raises BackendRejected."""
        for member in self._members.values():
            if None not in (vocab_size, member.info.vocab_size) and vocab_size != member.info.vocab_size:
                raise BackendRejected(
                    f"has a vocabulary of {vocab_size}, but pool {self.name!r} serves one of "
                    f"{member.info.vocab_size}",
                    hint="Register it in a pool of its own",
                    backend_id=backend_id,
                )

    def refuse_unknown_ids(self, ids: Sequence[int], known: int = 0) -> None:
        """Keep from the engines an id that their vocabulary lacks, which some crash on; raises BackendRejected.

        The first ids that are `known` were looked at in an earlier turn; they are again if the pool has served more
        than one vocabulary.
        """
        size = self._vocab_size()
        start = known if len(self._vocabularies) == 1 else 0
        new = ids[start:] if start else ids
        if size is not None and new and not 0 <= min(new) <= max(new) < size:
            position = next(i for i, token in enumerate(new, start) if not 0 <= token < size)
            raise BackendRejected(
                f"prompt id {ids[position]} at {position} is outside the vocabulary of {size} that pool "
                f"{self.name!r} serves",
                hint="Register the backend with the tokenizer of its own model",
            )

    def _vocab_size(self) -> int | None:
        for member in self._members.values():
            if member.info.vocab_size is not None:
                return member.info.vocab_size
        return None

    def _left(self, member: Member) -> None:
        self._on_leave(member.id)
        self.notify()
