"""The log of a service, as this process writes it within a block."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

import structlog

from rollout_service.observability.telemetry.logging import configure_logging
from rollout_service.settings import LogFormat


@contextmanager
def logged(log_format: LogFormat = LogFormat.CONSOLE, level: str = "debug") -> Iterator[io.StringIO]:
    """Configure the log as a service does, and collect what it writes; afterward other tests log as before."""
    before, handlers, root_level = structlog.get_config(), logging.root.handlers, logging.root.level
    text = io.StringIO()
    with redirect_stderr(text):
        configure_logging(log_format, level)
    # A module's logger that is cached would keep this configuration for good.
    structlog.configure(cache_logger_on_first_use=False)
    try:
        yield text
    finally:
        structlog.configure(**before)
        logging.root.handlers, logging.root.level = handlers, root_level
