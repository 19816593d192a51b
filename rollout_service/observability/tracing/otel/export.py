"""Sends spans to a collector, as the standard `OTEL_*` variables say.

No rollout waits for this: spans wait in a bounded queue, and a thread sends them. A collector that is slow or gone
costs only spans, which are counted. `close` returns within `FLUSH_SECONDS`, whatever the collector does.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import anyio
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.util.types import AttributeValue
from prometheus_client import CollectorRegistry, Counter

from rollout_service import __version__
from rollout_service.observability.tracing.otel.conventions import RolloutIds

FLUSH_SECONDS = 1.0
_QUEUE: Final = "OTEL_BSP_MAX_QUEUE_SIZE"
_QUEUE_SIZE = 2_048


class SpanCounts:
    """Counts the outcomes of spans; used by the event loop and by the exporter's thread."""

    def __init__(self, registry: CollectorRegistry, queue_size: int) -> None:
        text = "Spans of traces: exported, failed to be, or dropped by a full queue"
        counter = Counter("rollout_trace_spans_total", text, ("outcome",), registry=registry)
        self._exported, self._failed, self._dropped = map(counter.labels, ("exported", "failed", "dropped"))
        self._queue_size = queue_size
        self._lock = threading.Lock()
        self._waiting = 0

    def ended(self) -> None:
        """Count a span that enters the queue, and the one that it displaces."""
        with self._lock:
            self._waiting += 1
            if self._waiting <= self._queue_size:
                return
            self._waiting -= 1
        self._dropped.inc()

    def sent(self, count: int, *, ok: bool) -> None:
        (self._exported if ok else self._failed).inc(count)

    def taken(self, count: int) -> None:
        with self._lock:
            self._waiting -= min(count, self._waiting)


class CountingExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter, counts: SpanCounts) -> None:
        self._exporter = exporter
        self._counts = counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; an exception of the exporter counts as a failure."""
        self._counts.taken(len(spans))
        ok = False
        try:
            result = self._exporter.export(spans)
            ok = result is SpanExportResult.SUCCESS
            return result
        finally:
            self._counts.sent(len(spans), ok=ok)

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing: spans do not wait here."""
        del timeout_millis
        return True


class CountingProcessor(BatchSpanProcessor):
    def __init__(self, exporter: SpanExporter, counts: SpanCounts, queue_size: int) -> None:
        super().__init__(exporter, max_queue_size=queue_size)
        self._counts = counts

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._counts.ended()
        super().on_end(span)


class Exporter:
    def __init__(self, registry: CollectorRegistry, node: str, exporter: SpanExporter | None = None) -> None:
        """Send spans through `exporter`; by default over OTLP/HTTP, as the variables say.

        Raises:
            ValueError: A variable's value is wrong.
        """
        size = queue_size(os.environ)
        self._exporter = exporter or OTLPSpanExporter()
        self.counts = SpanCounts(registry, size)
        self.ids = RolloutIds()
        self.provider = TracerProvider(
            resource=_resource(os.environ, node), shutdown_on_exit=False, id_generator=self.ids
        )
        counting = CountingExporter(self._exporter, self.counts)
        self.provider.add_span_processor(CountingProcessor(counting, self.counts, size))

    async def close(self) -> None:
        """Send the waiting spans for at most `FLUSH_SECONDS`."""
        done, loop = anyio.Event(), asyncio.get_running_loop()

        def flush() -> None:
            self.provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set)

        # A thread of the pool would keep the process from ending while the collector does not answer.
        threading.Thread(target=flush, name="flush spans", daemon=True).start()
        with anyio.CancelScope(shield=True), anyio.move_on_after(FLUSH_SECONDS):
            await done.wait()


def queue_size(environ: Mapping[str, str]) -> int:
    """Return how many spans may wait, by the batch processor's own variable.

    Raises:
        ValueError: It is not a positive number.
    """
    given = environ.get(_QUEUE, "").strip()
    if given and not (given.isdecimal() and int(given) > 0):
        raise ValueError(f"{_QUEUE} is {given!r}, which is not a number of spans")
    return int(given) if given else _QUEUE_SIZE


def _resource(environ: Mapping[str, str], node: str) -> Resource:
    """Describe this service; the standard variables win."""
    ours: dict[str, AttributeValue] = {SERVICE_INSTANCE_ID: node, SERVICE_VERSION: __version__}
    if "OTEL_SERVICE_NAME" not in environ and "service.name" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        ours[SERVICE_NAME] = "rollout-service"
    return Resource.create().merge(Resource(ours))
