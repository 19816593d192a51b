"""What a job of a store's thread came to, on its way back to whoever waits for it on the event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class Job(Protocol):
    """A job that somebody waits for."""

    @property
    def future(self) -> asyncio.Future[Any]:
        """What the caller waits for."""
        ...


J_co = TypeVar("J_co", bound=Job, covariant=True)


@dataclass(frozen=True, slots=True)
class JobResult(Generic[J_co]):
    """The value of a job, or its error."""

    job: J_co
    value: Any = None
    error: BaseException | None = None

    def deliver(self) -> None:
        """Pass the result to the caller, unless the caller is gone. Call it on the event loop."""
        if self.job.future.done():
            return
        if self.error is not None:
            self.job.future.set_exception(self.error)
        else:
            self.job.future.set_result(self.value)
