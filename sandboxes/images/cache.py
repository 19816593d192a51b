"""The default folders of this user's images, and of the files made from them."""

import os
from pathlib import Path


def default_cache() -> Path:
    """Return `$XDG_CACHE_HOME/rollout-service`, by default below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-service"
