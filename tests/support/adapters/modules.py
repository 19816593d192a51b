"""Stand-ins for the modules of trainers that are not installed."""

import sys
from types import ModuleType
from typing import Any

import pytest


def modules(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Install a trainer's module that holds these members, with its parent packages, next to those installed before."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if not isinstance(sys.modules.get(path), StandIn):
            monkeypatch.setitem(sys.modules, path, StandIn(path))
    for member, value in members.items():
        monkeypatch.setattr(sys.modules[name], member, value, raising=False)


class StandIn(ModuleType):
    """A module that stands in for a trainer's own."""
