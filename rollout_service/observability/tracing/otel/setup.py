"""Switches traces on if the standard `OTEL_*` variables ask for them.

Without these variables OpenTelemetry's SDK is not imported, and no attempt is observed. If they ask for something
unsupported, the service refuses to start instead of exporting nothing.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager

import anyio.to_thread
import structlog
from prometheus_client import CollectorRegistry

from api_schemas.inference import BackendView
from rollout_service.activity import ActivityBoard
from rollout_service.base.errors import ConfigurationError
from sandboxes.extras import extra_hint

log = structlog.get_logger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


def is_wanted(environ: Mapping[str, str]) -> bool:
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none"
    if is_off or not any(environ.get(name, "").strip() for name in ENDPOINTS):
        return False
    if exporter not in ("", "otlp"):
        raise ConfigurationError(
            f"OTEL_TRACES_EXPORTER is {exporter!r}, which this service cannot do",
            hint="Set it to `otlp`, or to `none` for no traces.",
        )
    protocol = next((environ[name] for name in _PROTOCOLS if environ.get(name, "").strip()), _PROTOCOL)
    if protocol.strip().lower() != _PROTOCOL:
        raise ConfigurationError(
            f"traces over {protocol!r} are not supported",
            hint=f"Set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL to `{_PROTOCOL}`, which collectors take on port 4318.",
        )
    return True


@asynccontextmanager
async def tracing(
    board: ActivityBoard,
    registry: CollectorRegistry,
    node: str,
    backends: Callable[[], Iterable[BackendView]],
) -> AsyncIterator[None]:
    """Export a trace of every rollout that begins in the block, if the environment's variables ask for that."""
    if not is_wanted(os.environ):
        yield
        return
    try:
        from rollout_service.observability.tracing.otel.export import Exporter
        from rollout_service.observability.tracing.otel.observer import TraceObserver
    except ImportError as error:
        raise ConfigurationError(
            f"OTEL_* variables ask for traces, but {error.name or 'a package'} is not installed",
            hint=f"{extra_hint('otel')}. Or set OTEL_SDK_DISABLED=true.",
        ) from error
    try:
        exporter = await anyio.to_thread.run_sync(Exporter, registry, node)
    except ValueError as error:
        raise ConfigurationError(
            f"traces cannot be exported: {error}", hint="Correct the OTEL_* variables of the service."
        ) from error
    board.observe(TraceObserver(exporter.provider.get_tracer("rollout_service"), exporter.ids, backends))
    log.info("traces are exported", endpoint=next(os.environ[one] for one in ENDPOINTS if os.environ.get(one)))
    try:
        yield
    finally:
        await exporter.close()
