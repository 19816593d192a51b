"""Attempts become traces with the right tree, times and names; what is not sampled costs next to nothing."""

import hashlib
import sys
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, Sampler
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry, generate_latest

from api_schemas.base import TraceContext
from api_schemas.rollouts import Stage
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import ActivityBoard, in_lane, note_outcome, waits_for
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError
from rollout_service.engines.contract import GenerateRequest, SamplingOptions, new_request_id
from rollout_service.observability.tracing.otel import setup
from rollout_service.observability.tracing.otel.conventions import RolloutIds
from rollout_service.observability.tracing.otel.export import FLUSH_SECONDS, Exporter
from rollout_service.observability.tracing.otel.observer import TraceObserver
from rollout_service.observability.tracing.otel.setup import is_wanted, tracing
from tests.support.samples import backend_view, generation
from tests.support.waiting import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = TraceContext(traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="vendor=1")
ENGINE = backend_view("e1", kind="sglang", model_path="qwen", tokenizer_path="qwen", weight_version=3)


class Traced:
    """A board whose attempts are traced into memory."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.exporter, ids = InMemorySpanExporter(), RolloutIds()
        provider = TracerProvider(sampler=sampler, id_generator=ids, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.board = ActivityBoard()
        self.board.observe(TraceObserver(provider.get_tracer("test"), ids, lambda: [ENGINE]))

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def tree(self) -> set[tuple[str | None, str]]:
        """Return the spans with their parents, by name."""
        names = {span.context.span_id: span.name for span in self.exporter.get_finished_spans() if span.context}
        return {
            (names.get(span.parent.span_id, "outside") if span.parent else None, span.name)
            for span in self.exporter.get_finished_spans()
        }


@pytest.fixture
def traced() -> Traced:
    return Traced()


def is_sampled(traceparent: str) -> bool:
    return bool(int(traceparent[-2:], 16) & 1)


def turn(name: str = "e1") -> str | None:
    request = GenerateRequest(new_request_id(), [1, 2], SamplingOptions(max_new_tokens=9, temperature=0.5, seed=4))
    with waits_for(StepKind.ENGINE, name, request=request.request_id, prompt_tokens=2) as step:
        step.request = request
        traceparent = step.traceparent
        step.answer = generation(
            [5, 6, 7],
            versions=[3, 3, 4],
            prompt_tokens=2,
            cached_tokens=1,
            backend_id=name,
            engine_seconds=0.1,
        )
    return traceparent


def play(traced: Traced, rollout_id: str = "r-1", trace: TraceContext | None = None, attempt: int = 1) -> str | None:
    """Play an attempt of one turn and one tool call, and return what the engine was told."""
    with traced.board.working(rollout_id, attempt=attempt, environment="calc", trace=trace) as activity:
        for stage in (Stage.INIT, Stage.ROLLOUT, Stage.EVALUATE):
            activity.stage = stage
            with waits_for(StepKind.PLACE, stage):
                pass
            with waits_for(StepKind.WORKER, stage):
                pass
            if stage is Stage.INIT:
                with waits_for(StepKind.SANDBOX_START, "base") as step:
                    step.note(sandbox="s-1")
            elif stage is Stage.ROLLOUT:
                told = turn()
                with waits_for(StepKind.TOOL, "bash", call="c-1"):
                    pass
                with waits_for(StepKind.ARTIFACTS, "pack"):
                    pass
            else:
                with waits_for(StepKind.GRADER, "calc") as step, waits_for(StepKind.SANDBOX_START, "base"):
                    step.note(reward=0.5)
        note_outcome(state="completed", reward=0.5, stop_reason="finished", code=None)
    return told


async def test_an_attempt_is_a_tree_of_stages_agents_turns_and_tools(traced):
    told = play(traced)
    assert traced.tree() == {
        (None, "rollout calc"),
        ("rollout calc", "stage init"),
        ("stage init", "sandbox start base"),
        ("rollout calc", "stage rollout"),
        ("stage rollout", "invoke_agent calc"),
        ("invoke_agent calc", "chat qwen"),
        ("invoke_agent calc", "execute_tool bash"),
        ("stage rollout", "artifacts pack"),
        ("rollout calc", "stage evaluate"),
        ("stage evaluate", "evaluate calc"),
        ("evaluate calc", "sandbox start base"),
    }
    by_id = {span.context.span_id: span for span in traced.spans.values() if span.context}
    for span in traced.spans.values():
        around = by_id[span.parent.span_id] if span.parent else span
        assert (around.start_time or 0) <= (span.start_time or 0)
        assert (span.end_time or 0) <= (around.end_time or 0)
    chat = traced.spans["chat qwen"]
    assert chat.kind is SpanKind.CLIENT
    assert told.startswith(f"00-{chat.context.trace_id:032x}-{chat.context.span_id:016x}-")
    assert is_sampled(told)
    assert told[3:35] == hashlib.sha256(b"r-1").hexdigest()[:32]
    found = dict(chat.attributes or {})
    assert found.pop("gen_ai.response.id")
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sglang",
        "gen_ai.conversation.id": "r-1",
        "gen_ai.request.model": "qwen",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.seed": 4,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "server.address": "gpu-1",
        "server.port": 30000,
        "rollout.backend": "e1",
        "rollout.weight_version": 4,
    }
    root = dict(traced.spans["rollout calc"].attributes or {})
    assert root == {
        "rollout.id": "r-1",
        "rollout.environment": "calc",
        "rollout.attempt": 1,
        "rollout.state": "completed",
        "rollout.reward": 0.5,
        "rollout.stop_reason": "finished",
    }
    (event,) = traced.spans["evaluate calc"].events
    assert event.name == "gen_ai.evaluation.result"
    assert dict(event.attributes or {})["gen_ai.evaluation.score.value"] == 0.5


async def test_a_traced_caller_is_the_parent(traced):
    told = play(traced, trace=CALLER)
    root = traced.spans["rollout calc"]
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, SPAN)
    assert root.parent.trace_state.get("vendor") == "1"
    assert told[3:35] == TRACE


async def test_the_rollouts_of_a_run_link_to_its_order(traced):
    play(traced, "run.4.2", CALLER.model_copy(update={"link": True}))
    root = traced.spans["rollout calc"]
    assert root.parent is None
    (link,) = root.links
    assert f"{link.context.trace_id:032x}" == TRACE
    found = dict(root.attributes or {})
    assert (found["rollout.run"], found["rollout.group"]) == ("run", 4)


async def test_an_attempt_links_to_the_one_before_in_the_same_trace(traced):
    play(traced)
    first = traced.spans["rollout calc"].context
    traced.exporter.clear()
    play(traced, attempt=2)
    second = traced.spans["rollout calc"]
    assert second.context.trace_id == first.trace_id
    assert [link.context.span_id for link in second.links] == [first.span_id]


async def test_nothing_is_recorded_of_what_is_not_sampled_but_the_engine_is_told_so():
    traced = Traced(ParentBased(ALWAYS_OFF))
    told = play(traced)
    assert not traced.exporter.get_finished_spans()
    assert told is not None
    assert not is_sampled(told)
    assert play(traced, "r-2", CALLER) is not None
    assert {"rollout calc", "chat qwen"} <= set(traced.spans)  # the caller's decision comes first


async def test_a_failure_is_marked_where_it_happened(traced):
    with traced.board.working("r-1", attempt=1, environment="calc") as activity:
        activity.stage = Stage.EVALUATE
        with waits_for(StepKind.PLACE, "evaluate"):
            pass
        with pytest.raises(EnvironmentFailedError), waits_for(StepKind.GRADER, "calc"):
            raise EnvironmentFailedError("no")
        note_outcome(state="failed", code="environment_failed")
    grader, root = traced.spans["evaluate calc"], traced.spans["rollout calc"]
    for span in (grader, root):
        assert span.status.status_code is StatusCode.ERROR
        assert dict(span.attributes or {})["error.type"] == "environment_failed"


async def test_sub_agents_have_spans_of_their_own(traced):
    with traced.board.working("r-1", attempt=1, environment="calc") as activity:
        activity.stage = Stage.ROLLOUT
        with waits_for(StepKind.PLACE, "rollout"):
            pass
        turn()
        with in_lane("1"):
            turn()
    tree = traced.tree()
    assert ("invoke_agent calc", "invoke_agent calc/1") in tree
    assert ("invoke_agent calc/1", "chat qwen") in tree
    assert ("invoke_agent calc", "chat qwen") in tree


async def test_what_runs_at_once_is_a_part_of_what_it_runs_for(traced):
    with traced.board.working("r-1", attempt=1, environment="calc") as activity:
        activity.stage = Stage.ROLLOUT
        with waits_for(StepKind.PLACE, "rollout"):
            pass
        with in_lane("model call 2"):
            turn()
        with in_lane("call-7"), waits_for(StepKind.TOOL, "bash"):
            pass
        activity.stage = Stage.EVALUATE
        with waits_for(StepKind.PLACE, "evaluate"):
            pass
        with waits_for(StepKind.JUDGE, "rubric"), in_lane("vote 1"):
            turn("e2")
    assert {
        ("invoke_agent calc", "chat qwen"),
        ("invoke_agent calc", "execute_tool bash"),
        ("judge rubric", "chat e2"),
    } <= traced.tree()


async def test_a_wait_is_a_span_only_if_it_was_long(traced):
    with traced.board.working("r-1", attempt=1, environment="calc") as activity:
        activity.stage = Stage.INIT
        with waits_for(StepKind.PLACE, "init") as step:
            step.started += 60  # it has taken less than nothing
        with waits_for(StepKind.WORKER, "init") as step:
            step.started -= 2_000
    names = set(traced.spans)
    assert "wait for a worker: init" in names
    assert not any("place" in name for name in names)
    queued = dict(traced.spans["stage init"].attributes or {})["rollout.queued_s"]
    assert queued == pytest.approx(1_940, abs=60)


async def test_an_attempt_that_is_handed_back_says_so(traced):
    with traced.board.working("r-1", attempt=1, environment="calc"):
        pass
    assert dict(traced.spans["rollout calc"].attributes or {})["rollout.state"] == "queued"


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
    assert "opentelemetry-sdk" in refused.value.hint


@pytest.mark.parametrize("given", ["0", "-1", "many"])
async def test_a_wrong_value_is_a_known_error(monkeypatch, given):
    monkeypatch.setattr(setup.os, "environ", ENDPOINT | {"OTEL_BSP_MAX_QUEUE_SIZE": given})
    with pytest.raises(ConfigurationError, match="OTEL_BSP_MAX_QUEUE_SIZE"):
        async with tracing(ActivityBoard(), CollectorRegistry(), "node", tuple):
            pass


class Stuck(SpanExporter):
    """A collector that answers when the test lets it, with a failure."""

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
