"""The command line shows every figure on sub-agents next to the failure that it shows, and tells nothing from zero."""

import io

from rich.console import Console

from api_schemas.rollouts.figures import ParallelFigures, RunParallel
from rollout_service.cli.watch.sections import SIGNS, render_parallel
from rollout_service.groups import parallel_figures, work_sums
from tests.support.sub_agents import DIRECT, SERIAL, WIDE, rollout


def figures(*works) -> ParallelFigures:
    found = parallel_figures(work_sums(rollout(work) for work in works))
    assert found is not None
    return found


def lines(parallel: RunParallel) -> dict[str, list[str]]:
    """Return the cells of each row after its first, by the figure."""
    output = io.StringIO()
    Console(file=output, width=200).print(render_parallel(parallel))
    rows = (line.split("  ") for line in output.getvalue().splitlines())
    cells = ([cell.strip() for cell in row if cell.strip()] for row in rows)
    return {row[1]: row[2:] for row in cells}


def test_every_figure_is_shown_for_the_run_and_its_last_rollouts():
    shown = lines(RunParallel(total=figures(DIRECT, WIDE, SERIAL), recent=figures(DIRECT)))
    assert shown["figure"] == ["so far", "last 1"]
    assert shown["assign_rate"] == ["0.67", "0.00"]
    assert shown["critical/total"] == ["0.79", "1.00"]
    assert shown["finish_rate"] == ["0.80", "-"]
    assert shown["invalid"] == ["max_turns 0.20", "-"]
    assert shown["rollouts"] == ["3", "1"]


def test_without_recent_rollouts_there_is_no_column_for_them():
    shown = lines(RunParallel(total=figures(SERIAL)))
    assert shown["figure"] == ["so far"]
    assert shown["invalid"] == ["none"]


def test_no_figure_is_forgotten():
    named = {name for names in SIGNS.values() for name in names}
    assert named == set(ParallelFigures.model_fields) - {"solved"} | {"critical/total"}
