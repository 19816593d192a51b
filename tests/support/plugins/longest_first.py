"""Gives the longest tests to workers of pytest-xdist first, which makes all workers end at about the same time.

It needs `--dist loadgroup --no-loadscope-reorder`. Without workers, and among tests of one rank, the order is random.
"""

import pytest

LONGEST = (
    "sglang",
    "slurm run",
    "harnesses",
    "test_adapter_trl.py",
    "vllm",
    "conformance of an ordinary user",
    "wheels",
    "cli",
    "docker",
    "slurm",
    "a new user",
    "test_reward_hacks.py",
    "test_demo.py",
    "test_trainer_run.py",
    "test_live_demo.py",
    "test_benchmarks.py",
    "test_kill9.py",
    "openapi",
    "hang_ups",
    "docs_site",
    "test_apptainer_hostile.py",
)
"""Groups, and modules without a group, that take about a minute or more; the longest first."""


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests in place."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    groups = {str(name) for mark in item.iter_markers("xdist_group") for name in mark.args}
    names = {item.path.name, *groups}
    return next((rank for rank, name in enumerate(LONGEST) if name in names), len(LONGEST))
