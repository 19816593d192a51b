"""Tests of programs that do not run on the oldest Python of this project.

No package index has a Python, so where a machine has none, `scripts/test` cannot install these programs, and says so.
"""

import pytest

from rollout_service.base.errors import ConfigurationError
from rollout_service.environments.libraries import find_interpreter


def _is_there(oldest: tuple[int, int]) -> bool:
    try:
        find_interpreter("a test", oldest)
    except ConfigurationError:
        return False
    return True


needs_python_312 = pytest.mark.skipif(
    not _is_there((3, 12)), reason="needs Python 3.12 or newer, which this machine does not have"
)
needs_python_313 = pytest.mark.skipif(
    not _is_there((3, 13)), reason="needs Python 3.13 or newer, which this machine does not have"
)
