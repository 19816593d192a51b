"""The contract between the nodes that share a store: who is here, and who leads.

- A node's name belongs to one live service at a time.
- A node that has been silent for `DEAD_SECONDS` is declared dead by the next heartbeat of any other node. In the same
  step its leases are queued again, with the attempts that had begun still counted. While the store itself was away,
  nobody was silent: each node gets `DEAD_SECONDS` to report again.
- A service that was declared dead can claim and renew nothing until it has joined again.
- A role has at most one leader at a time. Its token grows with every change of leader, so a store can refuse the writes
  of an earlier one.
- All times are measured by the store's clock; the clocks of the nodes do not matter.

A store that only one process can have open keeps this contract with a single node, which leads every role.

Events, with the node's name as subject: `node.joined`, `node.left`, `node.dead` (`requeued`), `node.draining` and
`node.ready`. A single node that shares its store with nobody neither joins nor leaves, and records only the last two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from api_schemas.nodes import NodeState
from rollout_service.base.errors import ConfigurationError, ConflictError, NotFoundError

HEARTBEAT_SECONDS = 2.0
DEAD_SECONDS = 10.0
"""How long a node may be silent; four of its heartbeats have then been lost."""
LEADER_SECONDS = 6.0
"""How long a role stays with a leader that has stopped renewing; a leader renews with every heartbeat."""


class NameTakenError(ConfigurationError):
    """Another live node has the name."""

    code = "node_name_taken"

    def __init__(self, name: str, holder: str) -> None:
        super().__init__(
            f"another node is named {name!r}: {holder}",
            hint="Give each node that shares the store a name of its own: `[cluster] name`, or --node-name. "
            "If that node has crashed, its name is free 10 seconds later.",
        )
        self.name = name
        self.holder = holder


def unknown_node(name: str) -> NotFoundError:
    return NotFoundError(f"there is no node {name!r}", hint="List the nodes with GET /v1/nodes.")


def dead_node(name: str) -> ConflictError:
    return ConflictError(
        f"the node {name!r} is dead", hint="Start it again, or remove it with DELETE /v1/nodes/{node}."
    )


def live_node(name: str) -> ConflictError:
    return ConflictError(f"the node {name!r} is alive", hint="Stop its service; it then removes itself.")


@dataclass(frozen=True, slots=True)
class NodeReport:
    name: str
    owner: str
    """The identity in whose name it leases rollouts."""
    address: str = ""
    """Empty if unknown."""
    labels: Sequence[str] = ()
    environments: Sequence[str] = ()
    """Environments that are loaded there, with all required labels."""
    images: Sequence[str] = ()
    """Those of `environments` whose image is there, or that need none."""
    places: int = 0
    """The most rollouts that it works on at once, before their evaluation."""
    view: str = "{}"
    """A `NodeView` as JSON."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    report: NodeReport
    state: NodeState
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class Heartbeat:
    is_member: bool
    """If not, the node was declared dead: its leases are lost, and it has to join again once it has dropped their work.
    """
    state: NodeState = NodeState.READY
    places: int = 0
    """The sum over all nodes that claim rollouts."""
    environments: Mapping[str, int] = field(default_factory=dict)
    """How many nodes claim rollouts of each."""
    images: Mapping[str, int] = field(default_factory=dict)
    """How many of them have its image."""
    states: Mapping[str, int] = field(default_factory=dict)
    dead: Sequence[str] = ()
    """Nodes that this call declared dead."""


@dataclass(frozen=True, slots=True)
class RoleLease:
    role: str
    owner: str
    token: int
    """Grows with every change of leader."""


class ClusterStore(Protocol):
    """
    Raises:
        StoreError: The store fails; every method can raise it.
    """

    @property
    def is_shared(self) -> bool:
        """Whether other services may have the store open."""

    async def join(self, report: NodeReport, *, replacing: str | None = None) -> None:
        """Become a member, ready to claim rollouts.

        The name may be that of a node that left, was declared dead, or has been silent for `DEAD_SECONDS`. `replacing`
        is an owner that is certainly gone: it is declared dead if it still has the name.

        Raises:
            NameTakenError: A live node has the name.
        """

    async def heartbeat(self, report: NodeReport) -> Heartbeat:
        """Report a node, and declare silent ones dead."""

    async def leave(self, owner: str) -> None:
        """Queue the node's rollouts again, resign its roles and free its name. Idempotent."""

    async def nodes(self) -> Sequence[NodeRecord]:
        """Return all nodes by name, with dead ones that nobody has removed or replaced."""

    async def change_state(self, name: str, state: NodeState) -> None:
        """Tell a node to claim no more rollouts (`draining`), or to claim them again (`ready`).

        A store that nodes share gives a draining node no leases from then on.

        Raises:
            NotFoundError: No node has this name.
            ConflictError: The node is dead.
        """

    async def remove(self, name: str) -> None:
        """
        Raises:
            NotFoundError: No node has this name.
            ConflictError: The node is alive.
        """

    async def wait_for_change(self, after: int) -> int:
        """Wait until a node has joined, ended or changed its state since the call that returned `after`; start with 0.

        The first call returns at once.
        """

    async def lead(self, role: str, owner: str) -> RoleLease | None:
        """Claim a free role, or renew it, for `LEADER_SECONDS`; return None if another service leads it."""

    async def wait_for_role(self, role: str) -> None:
        """Wait until a role that another service leads may be free; only `lead` says whether it is.

        Leases that are renewed in time cost a member no request: its heartbeats tell of them.
        """

    async def resign(self, role: str, owner: str) -> None:
        """Give up a role, so that another service can lead at once. Idempotent."""

    async def leader(self, role: str) -> RoleLease | None: ...
