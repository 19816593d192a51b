"""What the service and its process of proxies say to each other: packets of JSON over a Unix socket of packets."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from sandboxes.egress.counts import EgressCounts

PACKET_BYTES = 192 * 1024
"""Less than what Linux lets an ordinary user's socket take at once."""


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """`open` comes with the listening socket; `close` answers with what its proxy counted, `counts` with all."""

    act: Literal["open", "close", "counts"]
    sandbox: str = ""
    allowed: tuple[str, ...] = ()
    private: bool = False

    def encode(self) -> bytes:
        """As a packet."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> "ProxyRequest":
        """From a packet."""
        return cls(**json.loads(packet))


def encode_counts(counts: EgressCounts) -> bytes:
    """The answer to every request."""
    return json.dumps(asdict(counts)).encode()


def decode_counts(packet: bytes) -> EgressCounts:
    """From an answer."""
    return EgressCounts(**json.loads(packet))
