"""The log of the service's process: structured events on stderr.

No event can steer the terminal that shows it, whatever a sandbox, a policy or an engine put into it. None has a secret
that an environment was given.
"""

from __future__ import annotations

import io
import logging
import os
import select
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TextIO

import structlog

from rollout_service.base.masking import mask, mask_texts
from rollout_service.base.terminal_text import escape_controls
from rollout_service.settings import LogFormat

log = structlog.get_logger(__name__)

WAIT_MILLISECONDS = 20
"""How long a line may wait for its reader; the event loop stands still meanwhile. Later lines do not wait at all."""

_hidden: list[Collection[str]] = []
"""The secrets of all services in this process, since it has one log."""


@contextmanager
def hidden_in_log(values: Collection[str]) -> Iterator[None]:
    """Mask these values in the log during the block; more may be added meanwhile."""
    _hidden.append(values)
    try:
        yield
    finally:
        _hidden[:] = [other for other in _hidden if other is not values]


def configure_logging(log_format: LogFormat, level: str) -> None:
    """Log to stderr: for people, or as one JSON object per line."""
    shared = _shared_processors(log_format)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = _handler()
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


class UnblockedHandler(logging.Handler):
    """Never waits for long for whoever reads the log.

    A reader may stop: a terminal after Ctrl-S, a `tee` that is suspended, a collector that hangs. Lines that it does
    not take are dropped, and their number is logged once it reads again.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._dropped = 0
        self._is_cut = False
        """Whether only the beginning of a line was taken."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            is_taken = self._write(self.format(record))
        except Exception:  # noqa: BLE001 - as logging's own handlers do
            self.handleError(record)
            return
        if not is_taken:
            self._dropped += 1
        elif self._dropped:
            lines, self._dropped = self._dropped, 0
            log.warning("the log was not read; lines of it are missing", lines=lines)

    def _write(self, line: str) -> bool:
        """Write a line; return whether all of it was taken."""
        wait = 0 if self._dropped else WAIT_MILLISECONDS
        start = "\n" if self._is_cut else ""
        left = f"{start}{line}\n".encode(errors="backslashreplace")
        while left and self._poll.poll(wait):
            # What is ready takes as much as this at once.
            left = left[os.write(self._descriptor, left[: select.PIPE_BUF]) :]
            self._is_cut = True
        self._is_cut = self._is_cut and bool(left)
        return not left


def _handler() -> logging.Handler:
    try:
        return UnblockedHandler(sys.stderr.fileno())
    except io.UnsupportedOperation:  # stderr is in memory
        return logging.StreamHandler(sys.stderr)


def _shared_processors(log_format: LogFormat) -> list[structlog.typing.Processor]:
    """Return the processors of our own events and of other libraries'."""
    mask_and_write = (
        [structlog.processors.format_exc_info, _mask_values]
        if log_format is LogFormat.JSON
        else [_mask_values, _escape_values]
    )
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        _name_uvicorn,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        *mask_and_write,
    ]


def _renderer(log_format: LogFormat) -> structlog.typing.Processor:
    if log_format is LogFormat.JSON:
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write_traceback)


def _mask_values(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Mask secrets of environments, since errors may quote programs that have them."""
    for values in _hidden:
        event = {name: mask_texts(value, values) for name, value in event.items()}
    return event


def _escape_values(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escape control characters, since errors may quote sandboxes, policies and engines."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = escape_controls(value)
    return event


def _write_traceback(output: TextIO, error: structlog.typing.ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, error)
    shown = text.getvalue()
    for values in _hidden:
        shown = mask(shown, values)
    output.write(escape_controls(shown))


def _name_uvicorn(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Rename uvicorn's logger, which is `uvicorn.error` whatever the level."""
    if event.get("logger") == "uvicorn.error":
        event["logger"] = "uvicorn"
    return event
