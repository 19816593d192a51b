"""Where this user's images, and what is made of them, are kept by default."""

import os
from pathlib import Path


def default_cache() -> Path:
    """Return `$XDG_CACHE_HOME/rollout-service`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-service"
