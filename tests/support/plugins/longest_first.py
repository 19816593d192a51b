"""Gives the longest tests to workers of pytest-xdist first, which makes all workers end at about the same time.

A module or a test says how long it takes with `pytest.mark.slow(seconds=60)`; in a group, one mark is enough for all.
This needs `--dist loadgroup --no-loadscope-reorder`. Without workers, and among tests that say the same, the order is
random.
"""

from collections import defaultdict

import pytest


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests in place."""
    longest: dict[object, float] = defaultdict(float)
    for item in items:
        for mark in item.iter_markers("slow"):
            longest[_unit(item)] = max(longest[_unit(item)], mark.kwargs.get("seconds", 0.0))
    items.sort(key=lambda item: -longest[_unit(item)])


def _unit(item: pytest.Item) -> object:
    """Return what one worker gets at once: a group, or a test without a group."""
    group = item.get_closest_marker("xdist_group")
    return group.args[0] if group else item.nodeid
