"""The contract of a provider, which starts sandboxes on this host."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from sandboxes.contract.sandbox import Sandbox
from sandboxes.contract.values import SandboxInfo, SandboxSpec, SweepReport
from sandboxes.egress.messages import EgressCounts


class SandboxProvider(ABC):
    """Starts sandboxes on this host, knows which are alive, and cleans up after dead services."""

    name: str
    isolates: bool
    """Whether code inside is kept from the host; False means that the code must be trusted."""

    @property
    def known_failures(self) -> Mapping[str, str]:
        """The checks of `sandboxes.conformance` that this provider fails, by name, with the reason."""
        return {}

    @property
    def enforced(self) -> frozenset[str]:
        """The limits that hold here for a whole sandbox: "memory", "processes", "cpus", "disk", and "users" for
        resources that the kernel counts by user of the host."""
        return frozenset()

    async def identity(self, spec: SandboxSpec) -> str:
        """Return a text that changes whenever the files that such a sandbox is made from change.

        A warm sandbox is reused only if this value is unchanged. It is "" if there are no such files.

        Raises:
            ImageNotFoundError: There is no such image.
            SandboxConfigError: The specification cannot be met.
        """
        _ = spec  # a working default: nothing of the host shows through
        return ""

    @property
    def limit_violations(self) -> Mapping[str, int]:
        """How often each limit was reached in all sandboxes since the provider was created."""
        return {}

    @property
    def lingering(self) -> int:
        """Number of processes of closed sandboxes that were killed and have not ended yet."""
        return 0

    async def egress_counts(self) -> EgressCounts:
        """Return the traffic of all sandboxes through their allow lists since the provider was created."""
        return EgressCounts()

    @abstractmethod
    async def start(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox that is ready to run commands. A cancelled start leaves nothing behind.

        Raises:
            ProviderUnavailableError: This host cannot run this provider's sandboxes.
            ImageNotFoundError: There is no such image.
            ImageError: The image cannot be used.
            SandboxConfigError: The specification cannot be met.
            SandboxStartError: The sandbox did not start, or not in time.
        """

    @abstractmethod
    async def sweep(self) -> SweepReport:
        """End the processes and remove the files that dead services left on this host; live services are left alone."""

    @abstractmethod
    def live(self) -> list[SandboxInfo]:
        """Return the live sandboxes of this provider, oldest first."""

    @abstractmethod
    async def close(self) -> None:
        """Close every live sandbox. Idempotent and shielded."""
