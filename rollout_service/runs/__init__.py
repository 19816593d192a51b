"""Runs: tasks in, batches of groups out, from the source of the tasks to the acknowledgment."""

from rollout_service.runs.delivery import Delivery, RunOverError
from rollout_service.runs.manager import ManagerOf, RunManager

__all__ = ["Delivery", "ManagerOf", "RunManager", "RunOverError"]
