"""Which place the settings name for large records."""

from __future__ import annotations

from rollout_service.settings import StoreSettings
from rollout_service.store.segments.contract import SegmentFiles
from rollout_service.store.segments.files import SharedFiles


def files_of(settings: StoreSettings, shard: int = 0) -> SegmentFiles | None:
    """Return the shared folder or the object store of a shard of the store; None if the settings name neither.

    Raises:
        ConfigurationError: The object store cannot be used, or its packages are not installed.
    """
    below = f"shard-{shard}" if max(settings.shards, len(settings.url)) > 1 else ""
    if settings.objects is not None:
        from rollout_service.store.segments.s3 import open_objects  # the packages may be missing

        address = f"{settings.objects.rstrip('/')}/{below}" if below else settings.objects
        return open_objects(address, endpoint=settings.objects_endpoint, region=settings.objects_region)
    return None if settings.folder is None else SharedFiles(settings.folder / below)
