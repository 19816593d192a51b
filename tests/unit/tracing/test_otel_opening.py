"""Traces are on exactly if the standard variables say so, and what the exporter does is counted."""

import sys
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, generate_latest

from rollout_service.activity import ActivityBoard
from rollout_service.base.errors import ConfigurationError
from rollout_service.observability.tracing.otel import setup
from rollout_service.observability.tracing.otel.export import FLUSH_SECONDS, Exporter, queue_size
from rollout_service.observability.tracing.otel.setup import is_wanted, tracing
from tests.support.waiting import until

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "no"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (ENDPOINT | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
    ],
)
def test_the_standard_variables_decide(environ, wanted):
    assert is_wanted(environ) is wanted


@pytest.mark.parametrize(
    "environ", [{"OTEL_TRACES_EXPORTER": "zipkin"}, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}]
)
def test_what_cannot_be_exported_is_refused_with_a_hint(environ):
    with pytest.raises(ConfigurationError) as refused:
        is_wanted(ENDPOINT | environ)
    assert "OTEL_" in refused.value.hint or "otlp" in refused.value.hint


async def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(setup.os, "environ", ENDPOINT)
    monkeypatch.setitem(sys.modules, "rollout_service.observability.tracing.otel.export", None)
    with pytest.raises(ConfigurationError, match="not installed") as refused:
        async with tracing(ActivityBoard(), CollectorRegistry(), "node", tuple):
            pass
    assert "[otel]" in refused.value.hint


async def test_a_wrong_value_is_a_known_error(monkeypatch):
    monkeypatch.setattr(setup.os, "environ", ENDPOINT | {"OTEL_BSP_MAX_QUEUE_SIZE": "many"})
    with pytest.raises(ConfigurationError, match="OTEL_BSP_MAX_QUEUE_SIZE"):
        async with tracing(ActivityBoard(), CollectorRegistry(), "node", tuple):
            pass


@pytest.mark.parametrize(("given", "size"), [("", 2_048), (" 7 ", 7)])
def test_the_queue_is_as_long_as_its_variable_says(given, size):
    assert queue_size({"OTEL_BSP_MAX_QUEUE_SIZE": given}) == size


@pytest.mark.parametrize("given", ["0", "-1", "many"])
def test_the_length_of_the_queue_is_a_number(given):
    with pytest.raises(ValueError, match="number of spans"):
        queue_size({"OTEL_BSP_MAX_QUEUE_SIZE": given})


class Stuck(SpanExporter):
    """A collector that answers only once it is told to, and then with a failure."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        self.answers.wait(30)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


def counted(registry: CollectorRegistry, outcome: str) -> float:
    return registry.get_sample_value("rollout_trace_spans_total", {"outcome": outcome}) or 0.0


@pytest.mark.slow
async def test_a_full_queue_drops_spans_and_counts_them(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "600")
    registry, stuck = CollectorRegistry(), Stuck()
    exporter = Exporter(registry, "node", stuck)
    tracer = exporter.provider.get_tracer("test")
    for _ in range(512):
        tracer.start_span("sent").end()
    assert stuck.asked.wait(30)
    for _ in range(1_000):
        tracer.start_span("queued").end()
    assert counted(registry, "dropped") == 400
    started = time.monotonic()
    await exporter.close()  # the collector does not answer
    assert time.monotonic() - started < FLUSH_SECONDS + 5
    stuck.answers.set()
    await until(lambda: counted(registry, "failed") >= 1_112, 30)
    assert counted(registry, "exported") == 0
    assert b"rollout_trace_spans_total" in generate_latest(registry)
