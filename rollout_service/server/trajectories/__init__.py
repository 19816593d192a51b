"""Trajectories for looking at: their outline, and ranges of their tokens with text."""

from rollout_service.server.trajectories.viewer import MAX_RANGE as MAX_RANGE
from rollout_service.server.trajectories.viewer import TrajectoryViewer as TrajectoryViewer
