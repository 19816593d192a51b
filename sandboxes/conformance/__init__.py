"""The contract as runnable checks, for anyone who writes a provider.

    python -m sandboxes.conformance apptainer
    python -m sandboxes.conformance my_package.provider:make --json report.json

Each check gets a fresh sandbox and its provider, and raises `ConformanceError` if the contract is broken; its docstring
is the contract's promise. A provider names the checks that it is known to fail (`known_failures`); any other failure
counts. Checks that attack do not run if the provider says that it does not isolate.
"""

from sandboxes.conformance import (
    bash,
    exports,
    files,
    image,
    isolation,
    lifecycle,
    pausing,
    programs,
    python,
    saving,
    snapshots,
)
from sandboxes.conformance.expectations import Check, ConformanceError, checks_in, expect, expect_error
from sandboxes.conformance.runner import CheckResult, ConformanceReport, run_check, run_checks

_MODULES = (bash, python, programs, files, image, exports, lifecycle, snapshots, saving, pausing, isolation)
CHECKS: tuple[Check, ...] = tuple(check for module in _MODULES for check in checks_in(module))
"""All checks, in the order in which they run."""

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "ConformanceError",
    "ConformanceReport",
    "expect",
    "expect_error",
    "run_check",
    "run_checks",
]
