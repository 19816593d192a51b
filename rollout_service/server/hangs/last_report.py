"""The last report in the state folder, for when the service does not answer.

Guarantee: the file is written whole or not at all, and its owner alone can read it. It is there only while the service
has something to say that it may not be able to say over HTTP.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import structlog
from pydantic import ValidationError

from api_schemas.views.hangs import HangReport
from rollout_service.base.private_files import write_private

log = structlog.get_logger(__name__)

FILE = "hangs.json"
STACKS = "stacks.txt"
"""Where Python itself writes the stacks of all threads at SIGUSR1, which works even if no Python code can run."""


class LastReport:
    """The file with the last report."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE
        self._is_written = True

    def write(self, report: HangReport | None) -> None:
        """Write a report in place of the one before; a full disk must not end the watch."""
        if report is None:
            return
        try:
            write_private(self._path, report.model_dump_json().encode())
            self._is_written = True
        except OSError as error:
            log.warning("the report of what hangs cannot be written", error=str(error))

    def forget(self) -> None:
        """Remove the file; idempotent."""
        if self._is_written:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._is_written = False


def read_last_report(state_dir: Path) -> HangReport | None:
    """Return the report in a state folder, or None if there is none."""
    try:
        report = HangReport.model_validate_json((state_dir / FILE).read_bytes())
    except (OSError, ValidationError):
        return None
    return report.model_copy(update={"source": "state_folder"})
