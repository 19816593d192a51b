"""The identity of a service that holds a lease, which tells whether its process is gone.

No two services ever have the same identity, whether they share a host, a host name, a process id or even a process.
`is_gone` is true only of a process that has certainly ended; it is false of every process that cannot be seen from
here, on another machine or in another container, whose leases must run out instead. A shared store asks it which leases
its `recover` may take back.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Self
from uuid import uuid4

from sandboxes.host.processes import boot_id, start_time

_FORM = re.compile(
    r"(?P<host>.*)/(?P<boot>[0-9a-f-]+)/(?P<pid_namespace>[0-9]+)/(?P<pid>[0-9]+)/(?P<started>[0-9]+)"
    r"/(?P<service>[0-9a-f]{12})",
    re.ASCII | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class ServiceIdentity:
    """A running service; its text names the owner of a lease."""

    host: str
    """Shown to people; others may have the same."""
    boot: str
    pid_namespace: int
    """Every container has its own."""
    pid: int
    started: int
    """Clock ticks since boot; process ids are used again."""
    service: str
    """Random, since a process may run one service after another."""

    @classmethod
    def create(cls) -> Self:
        pid = os.getpid()
        return cls(
            host=gethostname(),
            boot=boot_id(),
            pid_namespace=_pid_namespace(),
            pid=pid,
            started=start_time(pid) or 0,
            service=uuid4().hex[:12],
        )

    @classmethod
    def parse(cls, text: str) -> Self:
        """
        Raises:
            ValueError: The text is not an identity.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not the identity of a service")
        host, boot, pid_namespace, pid, started, service = found.groups()
        identity = cls(host, boot, int(pid_namespace), int(pid), int(started), service)
        if str(identity) != text:
            raise ValueError(f"{text!r} is not the identity of a service: a number has leading zeros")
        return identity

    def __str__(self) -> str:
        return f"{self.host}/{self.boot}/{self.pid_namespace}/{self.pid}/{self.started}/{self.service}"

    def is_gone(self) -> bool:
        if self.boot != boot_id() or self.pid_namespace != _pid_namespace():
            return False
        found = start_time(self.pid)
        return found != self.started and not (found is None and _is_anothers(self.pid))


def is_gone(owner: str) -> bool:
    """Return whether the owner has certainly ended; false of an owner without an identity."""
    try:
        return ServiceIdentity.parse(owner).is_gone()
    except ValueError:
        return False


def _is_anothers(pid: int) -> bool:
    """Return whether a process is another user's, which /proc hides on some hosts (`hidepid`)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        pass
    return False


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino
