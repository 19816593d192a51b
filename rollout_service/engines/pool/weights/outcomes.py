"""Commands to many backends at once, and errors for outcomes that failed on any backend in service.

A returned outcome means that every backend in service succeeded; an error names the failed backends and has every
backend's answer in its context.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import anyio

from api_schemas.inference import BackendOutcome, PoolOutcome
from rollout_service.engines.errors import (
    BackendRejected,
    BackendUnreachable,
    InferenceError,
    OrderFailed,
    WeightsNotLoaded,
    WeightsPartlyLoaded,
    WeightsRefused,
    WeightsUnusable,
)
from rollout_service.engines.pool.backend_handle import BackendHandle

OUT_OF_SERVICE = "out_of_service"
"""The code of a backend that was out of service before the command, and was not waited for."""


def failed_backends(outcome: PoolOutcome) -> list[BackendOutcome]:
    """Return the failed ones, except those that were out of service before."""
    return [each for each in outcome.outcomes if not each.ok and each.code != OUT_OF_SERVICE]


def check_weights_outcome(outcome: PoolOutcome, version: int) -> PoolOutcome:
    """Return the outcome of an update if every backend in service succeeded.

    Raises:
        WeightsRefused: All backends refused the weights, and keep their own.
        WeightsNotLoaded: No backend has the weights, and some could not be reached or are in an unknown state.
        WeightsPartlyLoaded: Some backends have the weights; the others are out of service.
        WeightsUnusable: Backends have the weights, but none can sample with them.
    """
    failed = failed_backends(outcome)
    if not failed:
        return outcome
    context = _context(outcome)
    if outcome.changed and not any(each.ok for each in outcome.outcomes):
        raise WeightsUnusable(
            f"no backend of pool {outcome.pool!r} can serve version {version}: {_named(failed)}",
            hint="They stay out of service. The weights may not be finite: look for NaN in the checkpoint and in the "
            "trainer's loss. Then load a later version, or this one again with `force`.",
            context=context,
        )
    if outcome.changed:
        raise WeightsPartlyLoaded(
            f"version {version} was loaded by {sum(each.ok for each in outcome.outcomes)} of {len(outcome.outcomes)} "
            f"backends, but not by {_named(failed)}",
            hint=f"Pool {outcome.pool!r} serves version {version}. The failed backends stay out of service until they "
            "have it: the service keeps trying them, and so does the next update.",
            context=context,
        )
    if all(each.code == BackendRejected.code for each in failed):
        raise WeightsRefused(
            f"no backend of pool {outcome.pool!r} loaded version {version}: {_named(failed)}",
            hint="They keep their present weights. Check that the folder exists where the engines run, that they can "
            "read it, and that it holds a checkpoint of their model.",
            context=context,
        )
    raise WeightsNotLoaded(
        f"no backend of pool {outcome.pool!r} loaded version {version}: {_named(failed)}",
        hint="See the engines' logs, then send the same request again. Backends that do not answer are out of service.",
        context=context,
    )


def check_outcome(outcome: PoolOutcome, command: str) -> PoolOutcome:
    """Return the outcome of another command if every backend in service succeeded.

    Raises:
        OrderFailed: A backend in service failed.
    """
    if failed := failed_backends(outcome):
        raise OrderFailed(
            f"pool {outcome.pool!r} could not {command} everywhere: {_named(failed)}",
            hint="GET /v1/backends shows which backends are in service; see the engines' logs.",
            context=_context(outcome),
        )
    return outcome


def _context(outcome: PoolOutcome) -> dict[str, object]:
    return {"outcome": outcome.model_dump(mode="json")}


def _named(failed: list[BackendOutcome]) -> str:
    return "; ".join(f"{each.backend_id}: {each.error}" for each in failed)


PoolCommand = Callable[[BackendHandle], Awaitable[None]]


@dataclass(slots=True)
class CommandRecord:
    in_flight: int
    version_before: int
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds that each started step took."""
    error: InferenceError | None = None
    is_known: bool = True
    """Whether its weights are known for certain."""

    @property
    def can_be_told(self) -> bool:
        return not isinstance(self.error, BackendUnreachable)


class FanOut:
    """A command at many backends, in one or more steps, with each backend's result.

    An error of one backend is its result and does not stop the others; afterwards it takes part only in the steps that
    ask for it.
    """

    def __init__(self, handles: Iterable[BackendHandle]) -> None:
        self.records = {handle: CommandRecord(handle.in_flight, handle.info.weight_version) for handle in handles}

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
        except Exception as caught:  # noqa: BLE001 - a plug-in's defect is its engine's failure alone
            error = handle.typed(caught)
            record.error = record.error or error
            handle.record_failure(error)
        record.steps[name] = time.perf_counter() - started

    def outcomes(self) -> list[BackendOutcome]:
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
