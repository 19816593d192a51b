"""Decides which hosts a sandbox may reach, by the environment's list and before a name is resolved.

Names are compared as the resolver sees them: in lower case, without a final dot, and international names in their
ASCII form. A text that could be read both as a name and as an address, such as `0x7f.1`, is neither.
"""

import ipaddress
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import idna

from sandboxes.errors import SandboxConfigError

DEFAULT_PORTS = frozenset({80, 443})
MAX_ENTRIES = 1000
MAX_BYTES = 128 * 1024
"""As JSON: a list is part of one message to the process of the proxies, which all sandboxes share."""
MAX_PORT = 65535
NAME_LIMIT = 253
LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
NAT64 = ipaddress.ip_network("64:ff9b::/96")
NEVER = tuple(
    ipaddress.ip_network(network)
    for network in (
        "0.0.0.0/8",  # this host
        "192.0.0.0/24",  # protocols' own addresses; Oracle's metadata service
        "168.63.129.16/32",  # Azure's platform
        "64:ff9b:1::/48",  # translated by local rules unknown here
        "fd00:ec2::/32",  # Amazon's metadata service
        "fd00:c1::/32",  # Oracle's
        "fd00:42::/32",  # Scaleway's
        "fd20:ce::/32",  # Google's
        "fec0::/10",  # site-local, which no longer exists
    )
)
"""No honest name resolves to these, although they are registered as public or private."""
ISATAP = frozenset({0x0000_5EFE, 0x0200_5EFE})
"""The 32 bits before the IPv4 address of an ISATAP tunnel."""
HINT = 'entries are HOST, *.HOST or an address, each may have :PORT: "example.com", "*.example.org:443", "[fd00::1]:80"'

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_address(text: str) -> Address | None:
    """Return an address in its usual form; None if the text is not one, or has a zone."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return None if address.scope_id else address.ipv4_mapped or address
    return address


def normalize_host(text: str) -> str:
    """Return the normal form of a name or an address, possibly in brackets.

    Raises:
        ValueError: The text is neither a name nor an address.
    """
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if (address := parse_address(bare)) is not None:
        return str(address)
    try:
        name = text.lower() if text.isascii() else idna.encode(text, uts46=True).decode().lower()
    except idna.IDNAError as error:
        raise ValueError(f"{text!r} is not a host name: {error}") from error
    labels = name.removesuffix(".").split(".")
    if len(name) > NAME_LIMIT or not all(LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text!r} is not a host name")
    if NUMBER.fullmatch(labels[-1]):
        raise ValueError(f"{text!r} is neither a host name nor an address in its usual form")
    return ".".join(labels)


def split_port(text: str) -> tuple[str, int | None]:
    """Split `HOST`, `HOST:PORT`, `[V6]`, `[V6]:PORT` or a bare `V6` into host and port.

    Raises:
        ValueError: The port is not a number from 1 to 65535.
    """
    if parse_address(text) is not None:
        return text, None
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text, None
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) <= MAX_PORT):
        raise ValueError(f"{port!r} is not a port")
    return host, int(port)


@dataclass(frozen=True, slots=True)
class HostRule:
    host: str
    subdomains: bool
    """Whether it matches the subdomains of `host`, and not `host` itself."""
    port: int | None
    """None means `DEFAULT_PORTS`."""

    @classmethod
    def parse(cls, entry: str) -> "HostRule":
        try:
            host, port = split_port(entry)
            subdomains = host.startswith("*.")
            name = normalize_host(host.removeprefix("*."))
        except ValueError as error:
            raise _invalid_entry(entry, str(error)) from error
        if subdomains and parse_address(name) is not None:
            raise _invalid_entry(entry, "an address has no subdomains")
        return cls(name, subdomains, port)

    def has_host(self, host: str) -> bool:
        if self.subdomains:
            return host.endswith(f".{self.host}")
        return host == self.host

    def has_port(self, port: int) -> bool:
        return port in DEFAULT_PORTS if self.port is None else port == self.port


def _invalid_entry(entry: str, why: str) -> SandboxConfigError:
    return SandboxConfigError(f"invalid entry {entry!r} in the network list: {why}", hint=HINT)


class AllowList:
    def __init__(self, entries: Iterable[str]) -> None:
        """
        Raises:
            SandboxConfigError: An entry is not valid, or there are too many, or they are too long.
        """
        self.entries = tuple(entries)
        if len(self.entries) > MAX_ENTRIES:
            raise SandboxConfigError(
                f"the network list has {len(self.entries)} entries; at most {MAX_ENTRIES} are allowed",
                hint="use *.HOST for many hosts of one domain",
            )
        if (size := len(json.dumps(self.entries))) > MAX_BYTES:
            raise SandboxConfigError(
                f"the network list takes {size} bytes; at most {MAX_BYTES} are allowed",
                hint="use *.HOST for many hosts of one domain",
            )
        self._rules = tuple(HostRule.parse(entry) for entry in self.entries)

    def has_host(self, host: str) -> bool:
        """`host` is in its normal form."""
        return any(rule.has_host(host) for rule in self._rules)

    def allows(self, host: str, port: int) -> bool:
        return any(rule.has_host(host) and rule.has_port(port) for rule in self._rules)

    def accepts_address(self, address: Address, port: int, *, private: bool) -> bool:
        """Return whether a listed name may resolve to this address: public, listed itself, or private if allowed.

        Loopback and link-local addresses (such as a cloud's metadata service) must always be listed.
        """
        if self.allows(str(address), port):
            return True
        return all(_is_reachable(one, private=private) for one in (address, *_embedded(address)))


def _is_reachable(address: Address, *, private: bool) -> bool:
    if address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified:
        return False
    if any(address in network for network in NEVER) or (address.is_reserved and address not in NAT64):
        return False
    return address.is_global or (private and address.is_private)


def _embedded(address: Address) -> list[Address]:
    """Return the IPv4 addresses that a router on the way may turn an IPv6 address into."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[Address] = [one for one in (address.sixtofour, *(address.teredo or ())) if one is not None]
    low = int(address)
    if address in NAT64 or (low >> 32) & 0xFFFFFFFF in ISATAP:
        found.append(ipaddress.IPv4Address(low & 0xFFFFFFFF))
    return found
