"""One command to many backends at once, in one step or several, and what each of them made of it.

Guarantees: an error of one backend is its answer, counted, and stops no other; after an error a backend takes
part in further steps only where the step says so.
"""

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import anyio

from api_schemas.inference import BackendOutcome
from rollout_service.inference.errors import BackendUnreachable, InferenceError
from rollout_service.inference.pool.backend_handle import BackendHandle

PoolCommand = Callable[[BackendHandle], Awaitable[None]]


@dataclass(slots=True)
class CommandRecord:
    """What came of a command at one backend."""

    in_flight: int
    version_before: int
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds of each step that was begun."""
    error: InferenceError | None = None
    is_known: bool = True
    """Whether the backend has the weights that it is said to have."""

    @property
    def can_be_told(self) -> bool:
        """Whether it still answers, as far as is known."""
        return not isinstance(self.error, BackendUnreachable)


class FanOut:
    """A command that is being carried out at these backends."""

    def __init__(self, handles: Iterable[BackendHandle]) -> None:
        self.records = {
            handle: CommandRecord(handle.in_flight, handle.info.weight_version) for handle in handles
        }

    async def step(self, name: str, command: PoolCommand, *, after_errors: bool = False) -> None:
        """Carry out `command` at every backend without an error; `after_errors` also at one that still answers."""
        async with anyio.create_task_group() as tasks:
            for handle, record in self.records.items():
                if record.error is None or (after_errors and record.can_be_told):
                    tasks.start_soon(self._tell, name, command, handle)

    async def _tell(self, name: str, command: PoolCommand, handle: BackendHandle) -> None:
        started, record = time.perf_counter(), self.records[handle]
        try:
            await command(handle)
        except InferenceError as caught:
            record.error = record.error or caught
            handle.record_failure(caught)
        record.steps[name] = time.perf_counter() - started

    def outcomes(self) -> list[BackendOutcome]:
        """The answers as the API shows them."""
        return [
            BackendOutcome(
                backend_id=handle.id,
                ok=record.error is None,
                seconds=sum(record.steps.values()),
                steps=record.steps,
                error=str(record.error) if record.error else None,
                code=record.error.code if record.error else None,
                in_flight=record.in_flight,
                version_before=record.version_before,
                version_after=handle.info.weight_version if record.is_known else None,
            )
            for handle, record in self.records.items()
        ]
