"""The wire models, each loaded when it is first used, so that importing the client loads none of them.

Most of the time of an import would go to pydantic and to models that the program never uses. Modules are loaded under
Python's import locks, so the first use may be in any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout_client import load_lazily

if TYPE_CHECKING:
    from pydantic import JsonValue as JsonValue

    from api_schemas.environments import EnvironmentView as EnvironmentView
    from api_schemas.errors import Problem as Problem
    from api_schemas.events import Event as Event
    from api_schemas.exports import ExportedSample as ExportedSample
    from api_schemas.exports import RecordedRollout as RecordedRollout
    from api_schemas.exports import Rescored as Rescored
    from api_schemas.exports import RescoreEnd as RescoreEnd
    from api_schemas.exports import RescoreOptions as RescoreOptions
    from api_schemas.exports import RescoreRollouts as RescoreRollouts
    from api_schemas.exports import RescoreRun as RescoreRun
    from api_schemas.exports import without_tokens as without_tokens
    from api_schemas.external import AgentKind as AgentKind
    from api_schemas.external import RolloutAccess as RolloutAccess
    from api_schemas.external import RolloutEnd as RolloutEnd
    from api_schemas.inference import AbortRequest as AbortRequest
    from api_schemas.inference import BackendSpec as BackendSpec
    from api_schemas.inference import BackendView as BackendView
    from api_schemas.inference import DiskWeights as DiskWeights
    from api_schemas.inference import DistributedWeights as DistributedWeights
    from api_schemas.inference import ExternalWeights as ExternalWeights
    from api_schemas.inference import PauseMode as PauseMode
    from api_schemas.inference import PauseRequest as PauseRequest
    from api_schemas.inference import PoolOutcome as PoolOutcome
    from api_schemas.inference import ResumeRequest as ResumeRequest
    from api_schemas.inference import Weights as Weights
    from api_schemas.inference import WeightsGroupRequest as WeightsGroupRequest
    from api_schemas.inference import WeightsRequest as WeightsRequest
    from api_schemas.nodes import NodeConcurrency as NodeConcurrency
    from api_schemas.nodes import NodePatch as NodePatch
    from api_schemas.nodes import NodeView as NodeView
    from api_schemas.nodes import Readiness as Readiness
    from api_schemas.nodes import SandboxView as SandboxView
    from api_schemas.rollouts import Rollout as Rollout
    from api_schemas.rollouts import RolloutPage as RolloutPage
    from api_schemas.rollouts import RolloutRequest as RolloutRequest
    from api_schemas.rollouts import RolloutState as RolloutState
    from api_schemas.rollouts.steps import RolloutAttempts as RolloutAttempts
    from api_schemas.rollouts.steps import RolloutSteps as RolloutSteps
    from api_schemas.rollouts.tokens import TokenRange as TokenRange
    from api_schemas.rollouts.tokens import TrajectoryOutline as TrajectoryOutline
    from api_schemas.rollouts.trees import AgentNode as AgentNode
    from api_schemas.rollouts.trees import RolloutNodes as RolloutNodes
    from api_schemas.runs import BINARY_MEDIA_TYPE as BINARY_MEDIA_TYPE
    from api_schemas.runs import COMPRESSED_MEDIA_TYPE as COMPRESSED_MEDIA_TYPE
    from api_schemas.runs import DECODED_LENGTH as DECODED_LENGTH
    from api_schemas.runs import AppendTasks as AppendTasks
    from api_schemas.runs import Batch as Batch
    from api_schemas.runs import BatchAnswer as BatchAnswer
    from api_schemas.runs import Group as Group
    from api_schemas.runs import Run as Run
    from api_schemas.runs import RunPage as RunPage
    from api_schemas.runs import RunPatch as RunPatch
    from api_schemas.runs import RunRequest as RunRequest
    from api_schemas.runs import RunState as RunState
    from api_schemas.runs.history import GroupPage as GroupPage
    from api_schemas.runs.history import GroupRow as GroupRow
    from api_schemas.runs.history import RunHistory as RunHistory
    from api_schemas.sessions import Canary as Canary
    from api_schemas.sessions import DeletedSessions as DeletedSessions
    from api_schemas.sessions import FeedbackAnswer as FeedbackAnswer
    from api_schemas.sessions import FeedbackByVersion as FeedbackByVersion
    from api_schemas.sessions import LiveSession as LiveSession
    from api_schemas.sessions import OpenedSession as OpenedSession
    from api_schemas.sessions import SessionFeedback as SessionFeedback
    from api_schemas.sessions import SessionPage as SessionPage
    from api_schemas.sessions import SessionRequest as SessionRequest
    from api_schemas.tasks import Task as Task
    from api_schemas.trajectories import Trajectory as Trajectory
    from api_schemas.views.hangs import HangReport as HangReport
    from api_schemas.views.hangs import RolloutActivity as RolloutActivity
    from api_schemas.views.overview import Overview as Overview
    from api_schemas.views.summaries import RolloutSummary as RolloutSummary
    from api_schemas.views.summaries import SummaryPage as SummaryPage
else:
    _NAMES = {
        "pydantic": "JsonValue",
        "api_schemas.environments": "EnvironmentView",
        "api_schemas.errors": "Problem",
        "api_schemas.events": "Event",
        "api_schemas.exports": (
            "ExportedSample RecordedRollout Rescored RescoreEnd RescoreOptions RescoreRollouts RescoreRun"
            " without_tokens"
        ),
        "api_schemas.external": "AgentKind RolloutAccess RolloutEnd",
        "api_schemas.inference": (
            "AbortRequest BackendSpec BackendView DiskWeights DistributedWeights ExternalWeights PauseMode PauseRequest"
            " PoolOutcome ResumeRequest Weights WeightsGroupRequest WeightsRequest"
        ),
        "api_schemas.nodes": "NodeConcurrency NodePatch NodeView Readiness SandboxView",
        "api_schemas.rollouts": "Rollout RolloutPage RolloutRequest RolloutState",
        "api_schemas.rollouts.steps": "RolloutAttempts RolloutSteps",
        "api_schemas.rollouts.tokens": "TokenRange TrajectoryOutline",
        "api_schemas.rollouts.trees": "AgentNode RolloutNodes",
        "api_schemas.runs": (
            "BINARY_MEDIA_TYPE COMPRESSED_MEDIA_TYPE DECODED_LENGTH AppendTasks Batch BatchAnswer Group Run RunPage "
            "RunPatch RunRequest RunState"
        ),
        "api_schemas.runs.history": "GroupPage GroupRow RunHistory",
        "api_schemas.sessions": (
            "Canary DeletedSessions FeedbackAnswer FeedbackByVersion LiveSession OpenedSession SessionFeedback"
            " SessionPage SessionRequest"
        ),
        "api_schemas.tasks": "Task",
        "api_schemas.trajectories": "Trajectory",
        "api_schemas.views.hangs": "HangReport RolloutActivity",
        "api_schemas.views.overview": "Overview",
        "api_schemas.views.summaries": "RolloutSummary SummaryPage",
    }
    _HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
    __getattr__ = load_lazily(globals(), _HOMES)
