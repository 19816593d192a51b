"""All that a service would miss, as files in one folder, and back: for one node, for many, and for a job of Slurm."""

from rollout_service.backup.creation import make_backup
from rollout_service.backup.manifest import Manifest, Places
from rollout_service.backup.restore import restore_backup

__all__ = ["Manifest", "Places", "make_backup", "restore_backup"]
