"""The conversations of a client's calls, captured token by token."""

from rollout_service.gateway.capture.capture import CapturePolicy, PlannedTurn, TurnCapture
from rollout_service.gateway.capture.echoes import CaptureReport, EchoMatch

__all__ = ["CapturePolicy", "CaptureReport", "EchoMatch", "PlannedTurn", "TurnCapture"]
