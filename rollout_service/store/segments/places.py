"""Which place the settings name for large records."""

from __future__ import annotations

from rollout_service.settings import StoreSettings
from rollout_service.store.segments.contract import SegmentFiles
from rollout_service.store.segments.files import SharedFiles


def files_of(settings: StoreSettings) -> SegmentFiles | None:
    """Return the shared folder of the settings; None if they name none."""
    return None if settings.folder is None else SharedFiles(settings.folder)
