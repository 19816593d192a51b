"""The running service: its parts that have a lifetime, and the operations that the routes call."""

from rollout_service.server.lifecycle.service import Service, check_image
from rollout_service.server.lifecycle.startup import open_service

__all__ = ["Service", "check_image", "open_service"]
