"""The trace that a request is part of, in the format of W3C Trace Context, so that other tools can follow it."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from api_schemas.base import Flag, WireModel


class TraceContext(WireModel):
    """The caller's span. Under the same id, a request with another one is still the same request."""

    traceparent: Annotated[
        str, StringConstraints(pattern=r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")
    ]
    """The version, the trace's id, the span's id and the flags, as in the header of that name."""
    tracestate: Annotated[str, StringConstraints(max_length=512)] = ""
    """Data of tracing tools, as in the header of that name."""
    link: Flag = False
    """Whether the rollout has a trace of its own that links to this span, instead of continuing its trace."""
