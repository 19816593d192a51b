"""The figures of a training: one line of JSON per step, the same for TensorBoard, and plots as PNG.

Guarantee: `curve.jsonl` has one line for each step, in order, even if the training was killed and resumed. The lines
after the checkpoint from which it resumes are removed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg  # draws to files and never opens a window
from matplotlib.figure import Figure

from api_schemas.rollouts.figures import ParallelFigures

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

SUB_AGENTS: Mapping[str, str] = {
    "perf": "perf",
    "assigns_per_turn": "assigns_per_turn",
    "width": "width_max",
    "critical_steps": "critical_steps",
    "valid_share": "finish_rate",
    "duplicate_share": "duplicate_share",
}
"""The curves in `sub_agents.png`, each with its figure in `ParallelFigures`; it is drawn if the points have any."""
COLUMNS = 3


class Curves:
    """The curves of one training, in one folder."""

    def __init__(self, folder: Path, *, after_steps: int = 0) -> None:
        """Continue after a step; 0 starts from the beginning."""
        # It imports torch, which takes seconds, and figures are read without it.
        from tensorboardX import SummaryWriter

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
        files = [draw(self.points, names, self.folder / f"{file}.png") for file, names in PLOTS.items()]
        if any(name in point for name in SUB_AGENTS for point in self.points):
            files.append(draw_multiples({"": self.points}, list(SUB_AGENTS), self.folder / "sub_agents.png"))
        return files

    def close(self) -> None:
        """Close the files; nothing can be added afterwards."""
        self._board.close()


def sub_agent_points(figures: ParallelFigures) -> dict[str, float]:
    """Return the part of a point that says how rollouts used sub-agents, without what there is no data on."""
    values = {name: getattr(figures, figure) for name, figure in SUB_AGENTS.items()}
    return {name: value for name, value in values.items() if value is not None}


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
    _plot(axes, file.stem, [(name, points, name) for name in names if any(name in point for point in points)])
    if axes.lines:
        axes.legend()
    figure.savefig(file, dpi=100)
    return file


def draw_multiples(trainings: Mapping[str, Sequence[Point]], names: Sequence[str], file: Path) -> Path:
    """Draw a small plot of each figure over the steps, with a curve for each training, and return the file.

    A training without a name stands alone and needs no legend.
    """
    rows = math.ceil(len(names) / COLUMNS)
    figure = Figure(figsize=(4.2 * COLUMNS, 2.8 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes, name in zip(grid, names, strict=False):
        _plot(axes, name, [(label, points, name) for label, points in trainings.items()])
    for axes in grid[len(names) :]:
        axes.set_axis_off()
    if any(trainings):
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(file, dpi=100)
    return file


def _plot(axes: Axes, title: str, curves: Iterable[tuple[str, Sequence[Point], str]]) -> None:
    """Plot figures over the steps; each curve is its label, its points, and the name of its figure."""
    for label, points, name in curves:
        there = [point for point in points if name in point]
        axes.plot([point["step"] for point in there], [point[name] for point in there], marker=".", label=label)
    axes.set_title(title.replace("_", " "))
    axes.set_xlabel("step")
    axes.grid(visible=True, alpha=0.3)


def _line(point: Point) -> str:
    return json.dumps(dict(point)) + "\n"
