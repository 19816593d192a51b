"""Programs that stand for others."""

from pathlib import Path


def write_script(path: Path, text: str, interpreter: str = "#!/bin/sh\n") -> Path:
    """Write a program that anyone may run, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(interpreter + text)
    path.chmod(0o755)
    return path
