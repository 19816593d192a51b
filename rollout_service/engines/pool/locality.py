"""Tells which engines run on this node."""

import ipaddress
import socket
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import psutil


def is_local(url: str) -> bool:
    """Return whether the host of `url` is this node's name or one of its addresses; no name is resolved."""
    return (urlsplit(url).hostname or "") in _own_names()


def is_loopback(url: str) -> bool:
    """Return whether the host of `url` is this machine for whoever asks."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@cache
def loopback_scope() -> str:
    """Return a name for all processes that share this one's loopback addresses: a boot and a network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"


@cache
def _own_names() -> frozenset[str]:
    names = {"localhost", socket.gethostname(), socket.gethostname().partition(".")[0]}
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family in {socket.AF_INET, socket.AF_INET6}:
                names.add(str(ipaddress.ip_address(address.address.partition("%")[0])))
    return frozenset(names)
