"""Large records in a folder, or in a part of a bucket, that the services of a store share."""

from rollout_service.store.segments.contract import SegmentFiles
from rollout_service.store.segments.folder import SegmentFolder
from rollout_service.store.segments.ledger import SegmentLedger

__all__ = ["SegmentFiles", "SegmentFolder", "SegmentLedger"]
