"""Messages between the service and the process of its proxies: JSON packets over a Unix packet socket."""

import json
from dataclasses import asdict, dataclass, field
from typing import Literal

PACKET_BYTES = 192 * 1024
"""An ordinary user's socket takes more at once on Linux."""


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """`open` carries the listening socket, `close` returns its proxy's counts, `counts` those of all."""

    act: Literal["open", "close", "counts"]
    sandbox: str = ""
    allowed: tuple[str, ...] = ()
    private: bool = False

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> "ProxyRequest":
        return cls(**json.loads(packet))


@dataclass(slots=True)
class EgressCounts:
    """Traffic of sandboxes through their allow lists; counts only grow."""

    connections: int = 0
    allowed: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Refusals by the code of their reason."""

    def add(self, other: "EgressCounts") -> None:
        self.connections += other.connections
        self.allowed += other.allowed
        self.bytes_out += other.bytes_out
        self.bytes_in += other.bytes_in
        for code, number in other.refused.items():
            self.refused[code] = self.refused.get(code, 0) + number


def encode_answer(counts: EgressCounts | None) -> bytes:
    return json.dumps(counts and asdict(counts)).encode()


def decode_answer(packet: bytes) -> EgressCounts | None:
    found = json.loads(packet)
    return found and EgressCounts(**found)
