"""A report of a test can be sent to another process, whatever the test printed or logged.

Guarantees: no text of a report that leaves a process holds a lone surrogate. Tests of hostile output print some;
pytest-xdist cannot encode them, and one failure of such a test would end the whole run.
"""

from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    return escape_surrogates((yield))


def escape_surrogates(data: Any) -> Any:
    """Return JSON-like data in which each lone surrogate is written as its escape sequence."""
    match data:
        case str():
            return data.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {key: escape_surrogates(value) for key, value in data.items()}
        case list() | tuple():
            return type(data)(map(escape_surrogates, data))
        case _:
            return data
