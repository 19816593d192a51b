"""The service at a glance, for pages and terminals: what `GET /v1/overview` and its stream answer."""

from rollout_service.service.overview.backend_figures import BackendFigures as BackendFigures
from rollout_service.service.overview.builder import OverviewBuilder as OverviewBuilder
from rollout_service.service.overview.feed import OverviewFeed as OverviewFeed
from rollout_service.service.overview.outcomes import Outcomes as Outcomes
