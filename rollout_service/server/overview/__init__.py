"""The service at a glance, for pages and terminals: the answer of `GET /v1/overview` and of its stream."""

from rollout_service.server.overview.builder import OverviewBuilder as OverviewBuilder
from rollout_service.server.overview.builder import OverviewFeed as OverviewFeed
from rollout_service.server.overview.outcomes import BackendFigures as BackendFigures
from rollout_service.server.overview.outcomes import Outcomes as Outcomes
