"""A collector that takes spans over OTLP/HTTP, as a real one does."""

import gzip
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.web_server import Answer, Asked, web_server


class Collector:
    """Keeps the spans that it is sent."""

    url: str

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []

    def take(self, asked: Asked) -> Answer:
        """Keep the spans of a request."""
        assert (asked.method, asked.path) == ("POST", "/v1/traces")
        is_packed = asked.headers.get("Content-Encoding") == "gzip"
        body = gzip.decompress(asked.body) if is_packed else asked.body
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append({one.key: one.value.string_value for one in of_resource.resource.attributes})
            for of_scope in of_resource.scope_spans:
                self.spans.extend(of_scope.spans)
        return 200, {}, b""


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector on a free port."""
    found = Collector()
    with web_server(found.take) as address:
        found.url = f"http://{address}"
        yield found


def attributes(span: Span) -> dict[str, object]:
    """Return a span's attributes as Python's values; lists as lists of texts."""
    found: dict[str, object] = {}
    for one in span.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        found[one.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found
