"""Which place the settings name for large records."""

from __future__ import annotations

from rollout_service.settings import StoreSettings
from rollout_service.store.segments.contract import SegmentFiles
from rollout_service.store.segments.files import SharedFiles


def files_of(settings: StoreSettings) -> SegmentFiles | None:
    """Return the shared folder or the object store of the settings; None if they name neither.

    Raises:
        ConfigurationError: The object store cannot be used, or its packages are not installed.
    """
    if settings.objects is not None:
        from rollout_service.store.segments.s3 import open_objects  # the packages may be missing

        return open_objects(
            settings.objects, endpoint=settings.objects_endpoint, region=settings.objects_region
        )
    return None if settings.folder is None else SharedFiles(settings.folder)
