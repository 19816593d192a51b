"""Messages between the service and the process of its proxies: JSON packets over a Unix packet socket."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from sandboxes.egress.counts import EgressCounts

PACKET_BYTES = 192 * 1024
"""Less than what an ordinary user's socket takes at once on Linux."""


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """A request. `open` carries the listening socket, `close` returns its proxy's counts, `counts` those of all."""

    act: Literal["open", "close", "counts"]
    sandbox: str = ""
    allowed: tuple[str, ...] = ()
    private: bool = False

    def encode(self) -> bytes:
        """Return it as a packet."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, packet: bytes) -> "ProxyRequest":
        """Return the request of a packet."""
        return cls(**json.loads(packet))


def encode_counts(counts: EgressCounts) -> bytes:
    """Return the packet that answers a request."""
    return json.dumps(asdict(counts)).encode()


def decode_counts(packet: bytes) -> EgressCounts:
    """Return the counts of an answer."""
    return EgressCounts(**json.loads(packet))
