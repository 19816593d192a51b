"""Sandboxes: places to run untrusted code, with persistent bash and Python sessions.

`make_provider(config, state_dir)` returns a provider, and `await provider.start(SandboxSpec(...))` a sandbox.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sandboxes import contract, errors
from sandboxes.contract import *  # noqa: F403  each `__all__` has the public names
from sandboxes.egress.messages import EgressCounts
from sandboxes.errors import *  # noqa: F403

if TYPE_CHECKING:
    from sandboxes.config import (
        ApptainerConfig,
        DockerConfig,
        E2BConfig,
        LimitDefaults,
        LocalConfig,
        PressureConfig,
        ProviderConfig,
        WarmPoolConfig,
        default_cache,
        default_state_dir,
    )
    from sandboxes.factory import make_provider

__all__ = [
    "ApptainerConfig",
    "DockerConfig",
    "E2BConfig",
    "EgressCounts",
    "LimitDefaults",
    "LocalConfig",
    "PressureConfig",
    "ProviderConfig",
    "WarmPoolConfig",
    "default_cache",
    "default_state_dir",
    "make_provider",
]
__all__ += contract.__all__
__all__ += errors.__all__


def __getattr__(name: str) -> Any:
    """Load settings and the factory when they are first used: the proxies' process does without pydantic."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "sandboxes.factory" if name == "make_provider" else "sandboxes.config"
    found = globals()[name] = getattr(import_module(home), name)
    return found
