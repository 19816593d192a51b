"""Ports for servers that must know their port before they start.

Guarantee: where the kernel's own range leaves room below it, a port is there, so no program that asks for any port gets
it. A server may take a minute to listen, and its port must not be given to another until then.
"""

import random
import socket
from contextlib import suppress
from pathlib import Path

GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, TRIED = 10_000, 64


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port that is free at an address now.

    Raises:
        OSError: The address is not this machine's, or no port is free there.
    """
    first_given = int(GIVEN.read_text().split()[0])
    below = range(LOWEST, max(LOWEST, first_given))
    for port in random.sample(below, min(TRIED, len(below))):
        with suppress(OSError), socket.create_server((address, port)):
            return port
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])
