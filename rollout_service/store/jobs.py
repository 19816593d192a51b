"""The jobs that a store does many at a time: the result of each, and the time to make them durable.

Guarantee: any thread may record a time, and any other may read them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from prometheus_client import Histogram

COMMIT_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Job(Protocol):
    """A job that somebody waits for."""

    @property
    def future(self) -> asyncio.Future[Any]:
        """The future that the caller awaits."""
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


def commit_times() -> Histogram:
    """Return an empty record, which belongs to no registry."""
    return Histogram(
        "rollout_store_commit_seconds",
        "Time to make the writes that waited together durable",
        buckets=COMMIT_SECONDS,
        registry=None,
    )
