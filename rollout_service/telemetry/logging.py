"""The log of the service's process: structured events on stderr.

Guarantee: no event can steer the terminal that shows it, whatever a sandbox, a policy or an engine put into it.
"""

from __future__ import annotations

import io
import logging
import sys
from typing import TextIO

import structlog

from rollout_service.settings import LogFormat
from rollout_service.terminal_text import escape_controls


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Send the log of this process to stderr: for people, or as one JSON object per line."""
    shared = _shared_processors(log_format)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _renderer(log_format)],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)


def _shared_processors(log_format: LogFormat) -> list[structlog.typing.Processor]:
    """Return the processors of our own events and of other libraries' alike."""
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        _name_uvicorn,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info if log_format is LogFormat.JSON else _escape_values,
    ]


def _renderer(log_format: LogFormat) -> structlog.typing.Processor:
    if log_format is LogFormat.JSON:
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write_traceback)


def _escape_values(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape control characters: errors quote programs in sandboxes, policies and engines."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = escape_controls(value)
    return event


def _write_traceback(output: TextIO, error: structlog.typing.ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    output.write(escape_controls(text.getvalue()))


def _name_uvicorn(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Name uvicorn's logger after the program: it logs everything to `uvicorn.error`, whatever the level."""
    if event.get("logger") == "uvicorn.error":
        event["logger"] = "uvicorn"
    return event
