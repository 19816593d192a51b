"""What goes out of sandboxes that are held to a list of hosts, as numbers that only grow."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class EgressCounts:
    """What a proxy, or several together, have done."""

    connections: int = 0
    allowed: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """By the code of the reason."""

    def add(self, other: "EgressCounts") -> None:
        """Count what another has counted."""
        self.connections += other.connections
        self.allowed += other.allowed
        self.bytes_out += other.bytes_out
        self.bytes_in += other.bytes_in
        for code, number in other.refused.items():
            self.refused[code] = self.refused.get(code, 0) + number
