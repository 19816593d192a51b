"""Finds steps that are stuck, slow or held back by comparing their waits with how long such waits took before."""

from rollout_service.server.hangs.heartbeat import read_last_report as read_last_report
from rollout_service.server.hangs.watch import HangWatch as HangWatch
