"""The file that `--json FILE` writes: what was measured, with which settings, on which machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import psutil
from pydantic import JsonValue

GIBIBYTE = 2**30


def machine() -> dict[str, JsonValue]:
    """What a figure depends on and a reader cannot see."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / GIBIBYTE, 1),
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def write_figures(
    path: Path, settings: Mapping[str, JsonValue], figures: Mapping[str, float | int | None]
) -> None:
    """Write `{"machine", "settings", "figures"}`; the figures are flat numbers, null where there is none."""
    document = {"machine": machine(), "settings": dict(settings), "figures": dict(figures)}
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
