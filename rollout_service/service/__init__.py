"""The running service: what has a lifetime, and what the routes work with."""

from rollout_service.service.opening import open_service
from rollout_service.service.service import Service, check_image

__all__ = ["Service", "check_image", "open_service"]
