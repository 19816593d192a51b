"""Runs: standing orders that yield batches of groups; from the tasks' files to the trainer's acknowledgement."""

from rollout_service.runs.delivery import Delivery, RunOverError
from rollout_service.runs.manager import RunManager

__all__ = ["Delivery", "RunManager", "RunOverError"]
