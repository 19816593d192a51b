"""Errors of MCP servers."""

from __future__ import annotations

from typing import ClassVar

from api_schemas.errors import Boundary
from rollout_service.base.errors import ServiceError


class McpServerError(ServiceError):
    """A server did not start, has ended, does not answer, or does not speak the protocol."""

    code = "mcp_server_failed"
    boundary: ClassVar[Boundary] = Boundary.ENVIRONMENT
    retryable = True


class McpCallError(Exception):
    """A server answered a request with an error of the protocol, such as wrong arguments."""
