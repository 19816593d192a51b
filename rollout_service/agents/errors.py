"""Errors of agents and of the tools that they call.

ServiceError
 `- ContextFullError     the next prompt would not fit the model's context
ToolInputError           the policy's own fault; goes back to it as the result of its call
"""

from __future__ import annotations

from typing import ClassVar

from api_schemas.errors import Boundary
from rollout_service.errors import ServiceError


class ContextFullError(ServiceError):
    """The next prompt would leave no room for an answer in the model's context."""

    code = "context_full"
    boundary: ClassVar[Boundary] = Boundary.TOKENS


class ToolInputError(Exception):
    """A tool call that cannot be carried out as the policy wrote it; the message is for the policy."""
