"""Errors on the wire: RFC 9457 problem details, and the failure that a rollout ended with."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from api_schemas.base import Flag, Integer, StrEnum, WireModel


class Boundary(StrEnum):
    """The boundary that an error crossed: where a person should look first."""

    REQUEST = "request"
    """The caller's request."""
    SANDBOX = "sandbox"
    """Starting or using a sandbox."""
    INFERENCE = "inference"
    """Talking to an engine."""
    TOKENS = "tokens"
    """Turning messages into token ids or back."""
    ENVIRONMENT = "environment"
    """An environment's own code, or its grader."""
    STORE = "store"
    """The durable store."""
    SERVICE = "service"
    """The service itself: a limit, a deadline, a shutdown, a defect."""


class ErrorInfo(WireModel):
    """Why a rollout, or one attempt at it, failed."""

    code: str
    """Stable, machine-readable name such as `sandbox_start_failed`."""
    boundary: Boundary
    message: str
    """What happened, for a person."""
    hint: str = ""
    """What to do next."""
    retryable: Flag = False
    """Whether the same rollout may succeed when it is tried again."""
    stage: str | None = None
    """The stage in which it happened: `init`, `rollout` or `evaluate`."""
    attempt: Integer | None = None
    """The attempt, counted from 1."""


class FieldError(WireModel):
    """One bad field of a request."""

    path: str
    """Where the field is, as in `body.task.environment`."""
    message: str


class Problem(WireModel):
    """An RFC 9457 problem, sent as `application/problem+json`."""

    type: str = "about:blank"
    title: str
    status: int = Field(ge=400, le=599)
    detail: str
    """What happened and what to do next."""
    code: str
    retryable: Flag = False
    errors: list[FieldError] = []
    """The fields at fault, when there are any."""
    context: dict[str, Any] = {}
    """What a program may want to know, such as the list of known environments."""


def sentences(message: str, hint: str) -> str:
    """Return what happened, and what to do next, as one text."""
    if not hint:
        return message
    message = message.rstrip()
    return f"{message} {hint}" if message.endswith((".", "?", "!")) else f"{message}. {hint}"
