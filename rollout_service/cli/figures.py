"""The document that `demo --json` and the benchmarks write: figures, with their settings and machine."""

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
    """Describe the machine that the figures depend on."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / GIBIBYTE, 1),
        "processor": _processor(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def figures_document(
    settings: Mapping[str, JsonValue],
    figures: Mapping[str, float | int | None],
    aims: Mapping[str, str] | None = None,
) -> dict[str, JsonValue]:
    """Return `{"machine", "settings", "figures"}`, and `"aims"` if there are any.

    Figures are a flat mapping to numbers, or null if there is none. Aims are texts such as `<= 2`, by their figures.
    """
    found: dict[str, JsonValue] = {"settings": dict(settings), "figures": dict(figures)}
    return {"machine": machine()} | found | ({"aims": dict(aims)} if aims else {})


def write_figures(
    path: Path,
    settings: Mapping[str, JsonValue],
    figures: Mapping[str, float | int | None],
    aims: Mapping[str, str] | None = None,
) -> None:
    """Write the document to a file."""
    document = figures_document(settings, figures, aims)
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
