"""Errors on the wire: RFC 9457 problem details for requests, and the failures of rollouts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from api_schemas.base import Flag, Integer, StrEnum, Text, WireModel


class Boundary(StrEnum):
    """Where a person should look first after an error."""

    REQUEST = "request"
    """The caller's request."""
    SANDBOX = "sandbox"
    """The start or the use of a sandbox."""
    INFERENCE = "inference"
    """The communication with an engine."""
    TOKENS = "tokens"
    """The conversion of messages to token ids, or back."""
    ENVIRONMENT = "environment"
    """An environment's own code, or its grader."""
    STORE = "store"
    """The durable store."""
    SERVICE = "service"
    """The service itself: a limit, a deadline, a shutdown or a defect."""


class ErrorInfo(WireModel):
    """Why a rollout, or one attempt at it, failed."""

    code: str
    """A stable, machine-readable name, such as `sandbox_start_failed`."""
    boundary: Boundary
    """Where to look first."""
    message: Text
    """A description of the failure, for people."""
    hint: Text = ""
    """Advice on what to do next."""
    retryable: Flag = False
    """Whether the same rollout may succeed if it is tried again."""
    stage: str | None = None
    """The stage that failed: `init`, `rollout` or `evaluate`."""
    attempt: Integer | None = None
    """The number of the failed attempt, counted from 1."""
    frames: Annotated[list[str], Field(exclude_if=lambda frames: not frames)] = []
    """The last calls in the environment's own code before a defect, the innermost last: module, line and function. They
    have neither values, nor lines of source, nor paths of the host."""


class FieldError(WireModel):
    """One invalid field of a request."""

    path: str
    """The path of the field, such as `body.task.environment`."""
    message: str


class Problem(WireModel):
    """An RFC 9457 problem, sent as `application/problem+json`."""

    type: str = "about:blank"
    title: str
    status: int = Field(ge=400, le=599)
    detail: str
    """A description of the error, and advice on what to do next."""
    code: str
    """A stable, machine-readable name, such as `not_found`."""
    retryable: Flag = False
    """Whether the same request may succeed if it is sent again."""
    errors: list[FieldError] = []
    """The invalid fields, if there are any."""
    context: dict[str, Any] = {}
    """Details for programs, such as the list of known environments."""


def sentences(message: str, hint: str) -> str:
    """Join a message and its hint into one text."""
    if not hint:
        return message
    message = message.rstrip()
    return f"{message} {hint}" if message.endswith((".", "?", "!")) else f"{message}. {hint}"
