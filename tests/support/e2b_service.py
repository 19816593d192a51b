"""The service with E2B's API, as a process, for programs that use the real package `e2b`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.service import Running, eventually, service

KEY, OTHER_KEY, READ_KEY = ("e2b_" + letter * 40 for letter in "abc")
CONFIG = f"""
keys = [
    {{ name = "one", role = "submit", key = "{KEY}" }},
    {{ name = "other", role = "submit", key = "{OTHER_KEY}" }},
    {{ name = "reader", role = "read", key = "{READ_KEY}" }},
]
[sandboxes.pressure]
enabled = false
[sandboxes.warm]
size = 0
[e2b]
enabled = true
port = 0
"""


def options(url: str, key: str = KEY) -> dict[str, Any]:
    """Return the options of E2B's client for an address."""
    return {"api_url": url, "sandbox_url": url, "api_key": key}


def point_programs_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables that docs/how-to/serve-e2b-programs.md says, and nothing else."""
    for name, value in {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": KEY}.items():
        monkeypatch.setenv(name, value)


@contextmanager
def e2b_service(folder: Path, settings: str = "") -> Iterator[tuple[Running, str]]:
    """Run the service in front of Apptainer; yield it, and the address of E2B's API."""
    with service(folder, None, CONFIG + settings, sandbox="apptainer") as running:
        pattern = re.compile(r"serving E2B's API .*?address=(\S+)")
        eventually(lambda: pattern.search(running.log), running)
        yield running, pattern.search(running.log)[1]
