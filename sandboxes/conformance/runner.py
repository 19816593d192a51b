"""Runs checks and distinguishes four outcomes: holds, fails, fails as known, and holds though known to fail."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import anyio

from sandboxes.conformance.expectations import Check, ConformanceError
from sandboxes.conformance.isolation import ATTACKS
from sandboxes.contract import SandboxProvider, SandboxSpec
from sandboxes.errors import SandboxError

CHECK_SECONDS = 120.0

Verdict = Literal["holds", "fails", "known failure", "holds now"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    check: str
    promise: str
    """The check's docstring."""
    verdict: Verdict
    reason: str
    """The finding, or why the failure is known; empty if the promise holds."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    provider: str
    isolates: bool
    enforced: tuple[str, ...]
    """According to the provider."""
    outcomes: tuple[CheckResult, ...]

    @property
    def conforms(self) -> bool:
        """Nothing failed except what the provider names."""
        return all(outcome.verdict != "fails" for outcome in self.outcomes)

    def as_json(self) -> dict[str, Any]:
        return {"conforms": self.conforms, **asdict(self)}


async def run_check(check: Check, provider: SandboxProvider, image: str | None = None) -> None:
    with anyio.move_on_after(CHECK_SECONDS) as scope:
        async with await provider.start(SandboxSpec(image=image, label="conformance")) as sandbox:
            await check(sandbox, provider)
    if scope.cancelled_caught:
        raise ConformanceError(f"the check did not finish within {CHECK_SECONDS:.0f} s")


async def run_checks(
    checks: Sequence[Check],
    provider: SandboxProvider,
    image: str | None = None,
    progress: Callable[[CheckResult], object] = lambda _: None,
) -> ConformanceReport:
    """Run checks one after the other; `progress` is called after each."""
    outcomes = []
    for check in checks:
        outcome = await assess_check(check, provider, image)
        progress(outcome)
        outcomes.append(outcome)
    return ConformanceReport(provider.name, provider.isolates, tuple(sorted(provider.enforced)), tuple(outcomes))


async def assess_check(check: Check, provider: SandboxProvider, image: str | None = None) -> CheckResult:
    """Run a check, but no attack if nothing isolates it."""
    known = provider.known_failures.get(check.__name__)
    begun = time.monotonic()
    found = "not run: the check attacks what is outside, and nothing here isolates it"
    if provider.isolates or check.__name__ not in ATTACKS:
        found = await _failure(check, provider, image)
    return CheckResult(
        check=check.__name__,
        promise=" ".join((check.__doc__ or "").split()),
        verdict=_verdict(found, known),
        reason=found if known is None else known,
        seconds=round(time.monotonic() - begun, 3),
    )


def _verdict(found: str, known: str | None) -> Verdict:
    if known is None:
        return "fails" if found else "holds"
    return "known failure" if found else "holds now"


async def _failure(check: Check, provider: SandboxProvider, image: str | None) -> str:
    found: list[Exception] = []
    try:
        await run_check(check, provider, image)
    except* (ConformanceError, SandboxError) as group:
        found = _leaves(group)
    return "; ".join(f"{type(error).__name__}: {error}" for error in found)


def _leaves(group: ExceptionGroup[Exception]) -> list[Exception]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (_leaves(error) if isinstance(error, ExceptionGroup) else [error])
    ]
