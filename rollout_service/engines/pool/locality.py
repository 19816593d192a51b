"""Tells which engines run on this node."""

import ipaddress
import socket
from functools import cache, lru_cache
from pathlib import Path
from urllib.parse import urlsplit


def is_local(url: str) -> bool:
    """Return whether the host is this node's name or one of its addresses; no name is resolved."""
    host = urlsplit(url).hostname or ""
    name = socket.gethostname()
    return host in {"localhost", name, name.partition(".")[0]} or _is_own_address(host)


def is_loopback(url: str) -> bool:
    """Return whether the host means this machine to whoever asks."""
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


@lru_cache(maxsize=1024)
def _is_own_address(host: str) -> bool:
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((host, 0))  # the kernel refuses an address that no interface has
    except (ValueError, OSError):
        return False
    return True
