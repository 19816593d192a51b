"""One command to many backends at once, in one or more steps, and each backend's result.

Guarantees: an error of one backend is recorded as its result and does not stop the others; after an error, a backend
takes part only in the steps that ask for it.
"""

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import anyio

from api_schemas.inference import BackendOutcome
from rollout_service.engines.errors import BackendUnreachable, InferenceError
from rollout_service.engines.pool.backend_handle import BackendHandle

PoolCommand = Callable[[BackendHandle], Awaitable[None]]


@dataclass(slots=True)
class CommandRecord:
    """The result of a command at one backend."""

    in_flight: int
    version_before: int
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds that each started step took."""
    error: InferenceError | None = None
    is_known: bool = True
    """Whether its weights are known for certain."""

    @property
    def can_be_told(self) -> bool:
        """Whether it still answers, as far as known."""
        return not isinstance(self.error, BackendUnreachable)


class FanOut:
    """A command in progress at a set of backends."""

    def __init__(self, handles: Iterable[BackendHandle]) -> None:
        self.records = {
            handle: CommandRecord(handle.in_flight, handle.info.weight_version) for handle in handles
        }

    async def step(self, name: str, command: PoolCommand, *, after_errors: bool = False) -> None:
        """Run `command` at every backend without an error; with `after_errors`, at all that still answer."""
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
        """Return the results as the API shows them."""
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
