"""The figures of a training: one line of JSON per step, the same for TensorBoard, and plots as PNG.

Guarantee: `curve.jsonl` has one line for each step, in order, even if the training was killed and resumed. The lines
after the checkpoint from which it resumes are removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws to files and never opens a window
from matplotlib.figure import Figure
from tensorboardX import SummaryWriter

Point = Mapping[str, float]

PLOTS: Mapping[str, Sequence[str]] = {
    "reward": ("reward",),
    "acceptance": ("acceptance",),
    "staleness": ("staleness", "staleness_max"),
    "entropy": ("entropy",),
    "logprob_difference": ("logprob_gap", "logprob_gap_max"),
    "stages": ("busy_init", "busy_rollout", "busy_evaluate"),
}
"""The curves in each plot, by the name of its file."""


class Curves:
    """The curves of one training, in one folder."""

    def __init__(self, folder: Path, *, after_steps: int = 0) -> None:
        """Continue after a step; 0 starts from the beginning."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = folder / "curve.jsonl"
        self.points = [point for point in read_points(self._file) if point["step"] <= after_steps]
        self._file.write_text("".join(map(_line, self.points)))
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after_steps + 1, flush_secs=10)

    def add(self, point: Point) -> None:
        """Add the figures of one step, including `step` itself."""
        self.points.append(point)
        with self._file.open("a") as file:
            file.write(_line(point))
        for name, value in point.items():
            if name != "step":
                self._board.add_scalar(name, value, int(point["step"]))

    def draw(self) -> list[Path]:
        """Draw all plots again, and return their files."""
        return [draw(self.points, names, self.folder / f"{file}.png") for file, names in PLOTS.items()]

    def close(self) -> None:
        """Close the files; nothing can be added afterwards."""
        self._board.close()


def read_points(file: Path) -> list[Point]:
    """Return the points in a file, without a last line that is incomplete."""
    if not file.exists():
        return []
    whole = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in whole if line.endswith("\n")]


def draw(points: Sequence[Point], names: Sequence[str], file: Path) -> Path:
    """Draw curves over the steps, each where it has values, and return the file."""
    figure = Figure(figsize=(6.4, 4.0))
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in names:
        there = [(point["step"], point[name]) for point in points if name in point]
        if not there:
            continue
        axes.plot([step for step, _ in there], [value for _, value in there], marker=".", label=name)
    axes.set_xlabel("step")
    axes.set_title(file.stem.replace("_", " "))
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(file, dpi=100)
    return file


def _line(point: Point) -> str:
    return json.dumps(dict(point)) + "\n"
