"""Divides tests among the workers of pytest-xdist, with `--dist loadgroup --no-loadscope-reorder`.

The tests of a module that share a fixture go to one worker: each other worker would start the same server or browser
once more. The longest tests come first, which makes all workers end at about the same time. A module or a test says how
long it takes with `pytest.mark.slow(seconds=60)`; in a group, one mark is enough for all. Without workers, and among
tests that say the same, the order is random.
"""

from collections import defaultdict

import pytest


def keep_together(items: list[pytest.Item]) -> None:
    """Make a group of the tests that share a fixture of their module, if they are in none.

    Call it before pytest-xdist reads the groups.
    """
    for item in items:
        if not item.get_closest_marker("xdist_group") and _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def _shares_a_fixture(item: pytest.Item) -> bool:
    # pytest has no public way to ask for the scope of a fixture.
    used = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return any(
        found and found[-1].scope in ("class", "module", "package")
        for name, found in used.items()
        if name != "anyio_backend"  # which starts nothing
    )


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
