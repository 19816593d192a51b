"""What is stuck, slow or held back: what each rollout waits for is compared with its history, and looked at."""

from rollout_service.server.hangs.last_report import read_last_report as read_last_report
from rollout_service.server.hangs.watch import HangWatch as HangWatch
