"""The packages of optional parts, as hints name them."""

import shlex
from importlib.metadata import PackageNotFoundError, requires

DISTRIBUTION = "rollout-service"


def extra_hint(extra: str) -> str:
    """Return how to install an extra. It names the packages, since the service itself need not be on an index."""
    try:
        lines = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # its sources were copied here, without what an installation writes
        lines = []
    packages = [line.partition(";")[0].strip() for line in lines if line.endswith(f"extra == '{extra}'")]
    command = shlex.join(["pip", "install", *packages]) if packages else "its packages are in pyproject.toml"
    return f"Install the extra {extra!r}: {command}"
