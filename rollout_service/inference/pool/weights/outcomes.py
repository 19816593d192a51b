"""Outcomes of orders to all backends of a pool: an order that failed anywhere is an error.

Guarantees: an outcome that is returned means that every backend in service carried the order out; one that is raised
names the failed backends and carries all answers in its context.
"""

from __future__ import annotations

from api_schemas.inference import BackendOutcome, PoolOutcome
from rollout_service.inference.errors import (
    BackendRejected,
    OrderFailed,
    WeightsNotLoaded,
    WeightsPartlyLoaded,
    WeightsRefused,
)

OUT_OF_SERVICE = "out_of_service"
"""The code of a backend that an order did not wait for, because it was out of service before."""


def failed_backends(outcome: PoolOutcome) -> list[BackendOutcome]:
    """Return the backends that failed the order, without those that were out of service before."""
    return [each for each in outcome.outcomes if not each.ok and each.code != OUT_OF_SERVICE]


def check_weights_outcome(outcome: PoolOutcome, version: int) -> PoolOutcome:
    """Return the outcome of an update that every backend in service took.

    Raises:
        WeightsRefused: all refused the weights, and keep those that they had.
        WeightsNotLoaded: none has them, and some could not be reached or may have anything.
        WeightsPartlyLoaded: some have them; the others are out of service.
    """
    failed = failed_backends(outcome)
    if not failed:
        return outcome
    context = _context(outcome)
    if outcome.changed:
        raise WeightsPartlyLoaded(
            f"version {version} was loaded by {_some(outcome)}, and not by {_named(failed)}",
            hint=f"Pool {outcome.pool!r} serves version {version}. The backends that failed are out of service until "
            "they have the pool's weights: they are tried again by themselves, and with the next update.",
            context=context,
        )
    if all(each.code == BackendRejected.code for each in failed):
        raise WeightsRefused(
            f"no backend of pool {outcome.pool!r} took version {version}: {_named(failed)}",
            hint="They keep the weights that they had. Check that the folder exists where the engines run, that they "
            "may read it, and that it holds a checkpoint of their model.",
            context=context,
        )
    raise WeightsNotLoaded(
        f"no backend of pool {outcome.pool!r} took version {version}: {_named(failed)}",
        hint="See the engines' logs, and send the same order again. Backends that do not answer are out of service.",
        context=context,
    )


def check_outcome(outcome: PoolOutcome, order: str) -> PoolOutcome:
    """Return the outcome of another order; raise OrderFailed unless every backend in service carried it out."""
    if failed := failed_backends(outcome):
        raise OrderFailed(
            f"pool {outcome.pool!r} could not {order} everywhere: {_named(failed)}",
            hint="GET /v1/backends shows which backends are in service; see the engines' logs.",
            context=_context(outcome),
        )
    return outcome


def _context(outcome: PoolOutcome) -> dict[str, object]:
    return {"outcome": outcome.model_dump(mode="json")}


def _some(outcome: PoolOutcome) -> str:
    return f"{sum(each.ok for each in outcome.outcomes)} of {len(outcome.outcomes)} backends"


def _named(failed: list[BackendOutcome]) -> str:
    return "; ".join(f"{each.backend_id}: {each.error}" for each in failed)
