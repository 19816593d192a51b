"""The trace that a request's headers name.

Guarantee: headers that are missing or malformed, which any proxy may have written, are as if they were not there.
"""

from __future__ import annotations

from fastapi import Request
from pydantic import ValidationError

from api_schemas.tracing import TraceContext


def trace_of(request: Request) -> TraceContext | None:
    """Return the caller's span, as the headers `traceparent` and `tracestate` say it; None if they do not."""
    traceparent = request.headers.get("traceparent")
    if traceparent is None:
        return None
    try:
        return TraceContext(traceparent=traceparent, tracestate=request.headers.get("tracestate", ""))
    except ValidationError:
        return None
