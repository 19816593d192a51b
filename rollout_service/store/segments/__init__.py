"""Large records in a folder that the services of a store share."""

from rollout_service.store.segments.folder import SegmentFolder
from rollout_service.store.segments.ledger import SegmentLedger, SegmentTotals

__all__ = ["SegmentFolder", "SegmentLedger", "SegmentTotals"]
