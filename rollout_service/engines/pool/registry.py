"""The backends of one pool, which of them may be used, and wake-ups for callers that wait for one."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import structlog

from api_schemas.inference import BackendState, BackendView, PauseMode
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.errors import BackendRejected, UnknownBackend
from rollout_service.engines.pool.backend_handle import BackendHandle

log = structlog.get_logger(__name__)


class BackendRegistry:
    """The backends of a pool in the order of their registration, and its pause.

    `on_leave` is called with the id of each backend that leaves service, since its KV is lost or useless then;
    `on_change` after every change of a backend or of the pause.
    """

    def __init__(self, name: str, on_leave: Callable[[str], None], on_change: Callable[[], None]) -> None:
        self.name = name
        self._paused: PauseMode | None = None
        self.paused_at: float | None = None
        """Unix time of the pause's beginning."""
        self.held = 0
        self._on_leave = on_leave
        self._on_change = on_change
        self._handles: dict[str, BackendHandle] = {}
        self._changed = ChangeSignal()
        self._vocabularies: set[int | None] = set()
        """All sizes that were ever served."""

    @property
    def paused(self) -> PauseMode | None:
        """The mode of the pause, or None; setting it wakes everyone who waits."""
        return self._paused

    @paused.setter
    def paused(self, mode: PauseMode | None) -> None:
        if mode is None:
            self.paused_at = None
        elif self._paused is None:
            self.paused_at = time.time()
        self._paused = mode
        self.notify()

    @property
    def has_served(self) -> bool:
        return bool(self._vocabularies)

    def __contains__(self, backend_id: object) -> bool:
        return backend_id in self._handles

    def __iter__(self) -> Iterator[BackendHandle]:
        return iter(list(self._handles.values()))

    def __len__(self) -> int:
        return len(self._handles)

    def __getitem__(self, backend_id: str) -> BackendHandle:
        if backend_id not in self._handles:
            raise UnknownBackend(
                f"pool {self.name!r} has no backend {backend_id!r}", hint="List them with GET /v1/backends."
            )
        return self._handles[backend_id]

    def get(self, backend_id: str) -> BackendHandle | None:
        return self._handles.get(backend_id)

    def ready(self) -> list[BackendHandle]:
        """Return those that may be given a request now; none during a pause."""
        if self._paused is not None:
            return []
        return [handle for handle in self._handles.values() if handle.state is BackendState.READY]

    def views(self) -> list[BackendView]:
        return [self.view(handle) for handle in self._handles.values()]

    def view(self, handle: BackendHandle) -> BackendView:
        return handle.view(self.name, paused=self.paused is not None)

    def add(self, handle: BackendHandle) -> None:
        self._handles[handle.id] = handle
        self._vocabularies.add(handle.info.vocab_size)
        self.notify()

    def remove(self, backend_id: str) -> BackendHandle:
        handle = self[backend_id]
        del self._handles[backend_id]
        self._left(handle)
        return handle

    def take_out(self, handle: BackendHandle) -> None:
        """Remove a backend from service until its probes succeed again."""
        if handle.state is BackendState.READY:
            log.warning(
                "backend lost",
                backend_id=handle.id,
                pool=self.name,
                error=handle.last_error,
                in_flight=handle.in_flight,
            )
        handle.take_out()
        self._left(handle)

    def drain(self, backend_id: str) -> BackendHandle:
        handle = self[backend_id]
        handle.state = BackendState.DRAINING
        self._left(handle)
        return handle

    def clear(self) -> list[BackendHandle]:
        return [self.remove(backend_id) for backend_id in list(self._handles)]

    def notify(self) -> None:
        self._changed.notify()
        self._on_change()

    async def wait_for_change(self) -> None:
        self.held += 1
        try:
            await self._changed.wait()
        finally:
            self.held -= 1

    def refuse_other_vocabulary(self, backend_id: str, vocab_size: int | None) -> None:
        for handle in self._handles.values():
            if None not in (vocab_size, handle.info.vocab_size) and vocab_size != handle.info.vocab_size:
                raise BackendRejected(
                    f"has a vocabulary of {vocab_size}, but pool {self.name!r} serves one of {handle.info.vocab_size}",
                    hint="Register it in another pool, after removing it from this one if it was there.",
                    backend_id=backend_id,
                )

    def refuse_unknown_ids(self, ids: Sequence[int], known: int) -> None:
        """Refuse ids outside the engines' vocabulary, on which some engines crash.

        The first `known` ids were checked in an earlier turn; they are checked again only if the pool has served more
        than one vocabulary.
        """
        sizes = (handle.info.vocab_size for handle in self._handles.values())
        size = next((each for each in sizes if each is not None), None)
        start = known if len(self._vocabularies) == 1 else 0
        new = ids[start:] if start else ids
        if size is not None and new and not 0 <= min(new) <= max(new) < size:
            position = next(i for i, token in enumerate(new, start) if not 0 <= token < size)
            raise BackendRejected(
                f"prompt id {ids[position]} at {position} is outside the vocabulary of {size} that pool "
                f"{self.name!r} serves",
                hint="Register the backend with its own model's tokenizer.",
            )

    def _left(self, handle: BackendHandle) -> None:
        self._on_leave(handle.id)
        self.notify()


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    router: Literal["cost", "least_loaded"] = "cost"
    """`cost` sends a request where it is expected to cost the least time; `least_loaded` only counts rollouts and
    requests."""
    hold_seconds: float = 120.0
    """Seconds that a request waits while the pool is paused, or while no backend is in service."""
    max_failures: int = 6
    """Failed calls, or aborts that leave no token to go on from, in a row that one request survives."""
    probe_interval: float = 2.0
    """Seconds between two probes of a backend's health."""
    probe_timeout: float = 10.0
    """Seconds."""
    unhealthy_after: int = 2
    """Failed probes or invalid answers in a row that take a backend out of service, and failed requests after which it
    has to sample a token to stay."""
    healthy_after: int = 2
    """Successful probes in a row that bring it back."""
    slow_start: float = 10.0
    """Seconds over which a backend that has joined grows to its fair share."""
    registration_timeout: float = 60.0
    """Seconds for all checks."""
    max_in_flight: int | None = None
    """On all backends together; the others wait, oldest rollouts first."""
    max_in_flight_per_backend: int | None = None
    """For each backend that was registered without its own limit."""
    load_interval: float = 1.0
    """Seconds between two polls of the load of an engine that has calls of the pool; less often without any."""
    stall_seconds: float = 60.0
    """Seconds that a call may be open on an engine without progress before it continues elsewhere."""
