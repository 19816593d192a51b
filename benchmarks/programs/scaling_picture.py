"""Draws the picture of `docs/clusters.md` from the figures of `scaling.py`.

Run: python benchmarks/programs/scaling_picture.py FIGURES.json PICTURE.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

MEASURED = (1, 2, 4, 8)
TICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_000)
DESCRIPTION = "The share of the full rate and the use of Redis's thread, over the number of nodes."


def draw(document: dict[str, Any]) -> Figure:
    figures, settings = document["figures"], document["settings"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    rates, use = figure.subplots(1, 2, sharex=True)
    measured = [1.0, *(figures[f"efficiency_{nodes}"] for nodes in MEASURED[1:])]
    rates.plot(MEASURED, measured, "o", color="black", label="measured", zorder=3)
    for axes, key in ((rates, "efficiency"), (use, "redis_thread")):
        for table, label, style in (
            ("model", f"model, {settings['places']} agents a node, {settings['rollout_seconds']:g} s", "-"),
            ("typical_model", "model, 64 agents a node, 60 s", "--"),
        ):
            rows = settings[table]
            axes.plot([row["nodes"] for row in rows], [row[key] for row in rows], style, label=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(TICKS))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda nodes, _: f"{nodes:,.0f}"))
        axes.tick_params(axis="x", labelrotation=45)
        axes.set_ylim(0, 1.1)
        axes.set_xlabel("nodes")
        axes.grid(alpha=0.3)
    rates.set_title("rollouts per second, as a share of the full rate", fontsize=10)
    use.set_title("use of Redis's thread", fontsize=10)
    rates.legend(loc="lower left", fontsize=8)
    return figure


def main(figures: Path, picture: Path) -> None:
    """Write the picture; the same figures give the same bytes."""
    mpl.rcParams |= {"svg.hashsalt": "scaling", "svg.fonttype": "none", "font.family": "sans-serif"}
    metadata = {"Date": None, "Title": "Scaling", "Description": DESCRIPTION}
    draw(json.loads(figures.read_text())).savefig(picture, metadata=metadata)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
