"""The figures of a command are its own, whichever process started it."""

import subprocess
import sys

import psutil
import pytest

from benchmarks.support.accounting import run_measured

SMALL_MB = 40.0
"""More than a bare Python takes, and less than the tests' process."""


def test_the_peak_memory_of_a_command_is_not_that_of_the_process_which_started_it():
    assert psutil.Process().memory_info().rss / 1e6 > SMALL_MB
    done = run_measured([sys.executable, "-c", "pass"])
    assert 1.0 < done.peak_mb < SMALL_MB
    assert done.cpu_seconds > 0.0
    assert done.seconds > 0.0


def test_a_command_that_fails_has_no_figures():
    with pytest.raises(subprocess.CalledProcessError):
        run_measured([sys.executable, "-c", "raise SystemExit(3)"])
