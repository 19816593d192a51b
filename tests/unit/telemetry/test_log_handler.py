"""A log that nobody reads holds up nothing, and says later what it lacks."""

import fcntl
import json
import os
from contextlib import redirect_stderr

import structlog

from rollout_service.observability.telemetry.logging import configure_logging
from rollout_service.settings import LogFormat
from tests.support.logging_of_service import logged


def test_lines_that_nobody_reads_are_dropped_and_counted():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    with os.fdopen(reader, "rb", 0) as log, os.fdopen(writer, "w") as stderr, logged():
        with redirect_stderr(stderr):
            configure_logging(LogFormat.JSON, "info")
        structlog.configure(cache_logger_on_first_use=False)
        for size in (10, 9000, 10, 10):  # the second is cut
            structlog.get_logger("test").info("x" * size)
        before = log.read(1 << 16).splitlines()
        structlog.get_logger("test").info("again")
        cut, again, missing = log.read(1 << 16).splitlines()
    assert json.loads(before[0])["event"] == "x" * 10
    assert len(before) == 2
    assert cut == b""
    assert json.loads(again)["event"] == "again"
    assert json.loads(missing) | {"lines": 3, "level": "warning"} == json.loads(missing)
