"""Runs: tasks in, batches of groups out, from the source of the tasks to the acknowledgment."""

from rollout_service.runs.delivery import Delivery, RunOverError
from rollout_service.runs.manager import RunManager

__all__ = ["Delivery", "RunManager", "RunOverError"]
