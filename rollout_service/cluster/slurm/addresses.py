"""Addresses and names within a job."""

from __future__ import annotations

import os
import socket


def own_address() -> str:
    """Return the address at which the other nodes of the job reach this one."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = "127.0.0.1"
    if not address.startswith("127."):
        return address
    # Some systems list their own name with a loopback address: take the one that leads to the job's first node.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "192.0.2.1"), 9))
        except OSError:
            return address
        return str(probe.getsockname()[0])


def node_name() -> str:
    """Return this node's name in Slurm."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
