"""What a client's calls say of its conversations, and what it receives, to the token."""

from rollout_service.gateway.capture.capture import CapturePolicy, PlannedTurn, TurnCapture
from rollout_service.gateway.capture.echoes import EchoMatch
from rollout_service.gateway.capture.report import CaptureReport

__all__ = ["CapturePolicy", "CaptureReport", "EchoMatch", "PlannedTurn", "TurnCapture"]
