"""A real service sends traces over OTLP/HTTP, tells engines of them, and is not harmed by a collector that is gone."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Replies, ScriptedEngine
from tests.support.otel.collector import Collector, attributes, collector
from tests.support.processes.service import GREETING, Running, eventually, service

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
STOP_SECONDS = 20.0
TURNS = 3


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    """Run an engine in this process, beside the event loop of the test."""
    model = policy_folder("calc-tuned")
    vocabulary = json.loads((model / "config.json").read_bytes())["vocab_size"]
    scripted = ScriptedEngine(Replies.from_texts([GREETING], model), vocab_size=vocabulary, model_path=model.resolve())
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(scripted):
        yield scripted


@pytest.fixture
def spans() -> Iterator[Collector]:
    with collector() as running:
        yield running


def config(engine: ScriptedEngine, *, trace: bool = True) -> str:
    told = "true" if trace else "false"
    return f'log_format = "json"\n[[backends]]\nurl = "{engine.url}"\ntrace = {told}\n'


def order(rollout_id: str, number: int = 1) -> dict[str, Any]:
    return {"rollout_id": rollout_id, "task": {"environment": "echo", "instance": {"number": number}}}


def run(server: Running, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/v1/rollouts?wait=60", json=body, headers=headers, timeout=90)
    answer.raise_for_status()
    return answer.json()


def tree(spans: list[Span]) -> set[tuple[str, str]]:
    names = {span.span_id: span.name for span in spans}
    return {(names.get(span.parent_span_id, span.parent_span_id.hex()), span.name) for span in spans}


def test_a_rollout_is_one_trace_that_continues_the_callers(tmp_path, engine, spans, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", spans.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # nothing is sent before the shutdown
    with service(tmp_path, None, config(engine), turns=TURNS) as server:
        assert run(server, order("r-1"), HEADERS)["state"] == "completed"
        again = {"traceparent": f"00-{TRACE}-{'2' * 16}-01"}
        assert run(server, order("r-1"), again)["attempt"] == 1  # the same request, from another span
        other = httpx.post(f"{server.url}/v1/rollouts", json=order("r-1", 2), headers=HEADERS)
        assert other.status_code == 409
        assert not spans.spans
        server.stop()
        server.ended(STOP_SECONDS)
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    assert {"stage init", "stage rollout", "stage evaluate"} <= {span.name for span in spans.spans}
    model = str(policy_folder("calc-tuned").resolve())
    found = tree(spans.spans)
    assert {
        (SPAN, "rollout echo"),
        ("rollout echo", "stage rollout"),
        ("stage rollout", "invoke_agent echo"),
        ("invoke_agent echo", f"chat {model}"),
        ("invoke_agent echo", "execute_tool bash"),
        ("stage init", "sandbox start base"),
        ("stage evaluate", "evaluate echo"),
    } <= found
    assert {span.trace_id.hex() for span in spans.spans} == {TRACE}
    chats = [span for span in spans.spans if span.name.startswith("chat ")]
    assert len(chats) == TURNS
    told = [one.split("-")[1:3] for one in engine.traceparents[-TURNS:] if one is not None]
    assert told == [[span.trace_id.hex(), span.span_id.hex()] for span in chats]
    usage = [attributes(span)["gen_ai.usage.output_tokens"] for span in chats]
    assert all(isinstance(one, int) and one > 0 for one in usage)
    assert spans.resources[0]["service.name"] == "rollout-service"
    assert all(line.get("trace_id", TRACE) == TRACE for line in lines)


def test_a_crash_and_a_restart_continue_the_trace(tmp_path, engine, spans, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{spans.url}/v1/traces")
    with service(tmp_path, None, config(engine)) as server:
        server.wait_until_ready()
        engine.latency = 600.0
        sent = httpx.post(f"{server.url}/v1/rollouts", json=order("r-1"), headers=HEADERS)
        assert sent.status_code == 202
        eventually(lambda: any(engine.traceparents), server.log_file)
        server.stop(signal.SIGKILL)
        server.ended(STOP_SECONDS)
    engine.latency = 0.0
    spans.spans.clear()
    with service(tmp_path, None, config(engine)) as server:
        result = httpx.get(f"{server.url}/v1/rollouts/r-1?wait=60", timeout=90).json()
        assert result["state"] == "completed"
        server.stop()
        server.ended(STOP_SECONDS)
    (root,) = [span for span in spans.spans if span.name == "rollout echo"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
    assert attributes(root)["rollout.attempt"] == result["attempt"]


def test_a_collector_that_is_gone_harms_nothing(tmp_path, engine, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with service(tmp_path, None, config(engine, trace=False)) as server:
        assert run(server, order("r-1"))["state"] == "completed"
        failed = 'rollout_trace_spans_total{outcome="failed"}'
        eventually(lambda: count(server, failed) > 0, server.log_file)
        assert count(server, 'rollout_trace_spans_total{outcome="exported"}') == 0
        assert not any(engine.traceparents)  # this backend was not told to trace
        server.stop()
        assert server.ended(STOP_SECONDS) in (-signal.SIGTERM, 128 + signal.SIGTERM)
        assert "Traceback" not in server.log


def count(server: Running, sample: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(sample))
