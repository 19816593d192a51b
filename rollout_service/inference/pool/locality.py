"""Tells which engines run on this node."""

import ipaddress
import socket
from functools import cache
from urllib.parse import urlsplit

import psutil


def is_local(url: str) -> bool:
    """Return whether the host of `url` is this node's name or one of its addresses; no name is resolved."""
    return (urlsplit(url).hostname or "") in _own_names()


@cache
def _own_names() -> frozenset[str]:
    names = {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in {socket.AF_INET, socket.AF_INET6}:
                names.add(str(ipaddress.ip_address(address.address.partition("%")[0])))
    return frozenset(names)
