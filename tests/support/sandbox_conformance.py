"""Checks of the sandbox contract, as tests assert them."""

from sandboxes import SandboxProvider
from sandboxes.conformance import Check
from sandboxes.conformance.runner import assess_check


async def conforms(check: Check, provider: SandboxProvider) -> None:
    """Assert that a check holds or fails as declared; a declared failure that holds is an error too."""
    outcome = await assess_check(check, provider)
    expected = "known failure" if check.__name__ in provider.known_failures else "holds"
    assert outcome.verdict == expected, outcome.reason
