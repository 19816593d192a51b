"""What rollouts under way do and wait for: noted at each boundary, for timelines, traces and the search for hangs."""

from rollout_service.activity.board import ActivityBoard as ActivityBoard
from rollout_service.activity.record import Activity as Activity
from rollout_service.activity.record import OpenStep as OpenStep
from rollout_service.activity.record import StepObserver as StepObserver
from rollout_service.activity.record import current_activity as current_activity
from rollout_service.activity.record import current_lane as current_lane
from rollout_service.activity.record import current_step as current_step
from rollout_service.activity.record import in_lane as in_lane
from rollout_service.activity.record import note_outcome as note_outcome
from rollout_service.activity.record import noting as noting
from rollout_service.activity.record import waits_for as waits_for
