"""Counters of what sandboxes send and receive through their allow lists; they only grow."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class EgressCounts:
    """The counts of one proxy, or of several together."""

    connections: int = 0
    allowed: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Refusals by the code of their reason."""

    def add(self, other: "EgressCounts") -> None:
        """Add the counts of another."""
        self.connections += other.connections
        self.allowed += other.allowed
        self.bytes_out += other.bytes_out
        self.bytes_in += other.bytes_in
        for code, number in other.refused.items():
            self.refused[code] = self.refused.get(code, 0) + number
