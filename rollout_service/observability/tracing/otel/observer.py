"""Makes a trace of every rollout from the steps of its attempts.

A rollout is one trace, over all its attempts. It continues the caller's trace if one came with the request, with that
trace's decision whether to record it. The rollouts of a run, of which there may be a million, have traces of their own
that link to the order.

Every span of an attempt has ended once it has, and none outlives its parent's stage. An attempt that is not sampled
costs one span that is not recorded, whose ids engines still get. Times are those of the steps, whenever a span is made.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from api_schemas.base import TraceContext
from api_schemas.inference import BackendView
from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import Activity, OpenStep, StepObserver
from rollout_service.base.ids import SampleId
from rollout_service.observability.tracing.otel import conventions as names
from rollout_service.observability.tracing.otel.conventions import RolloutIds, trace_id_of

SHORTEST_WAIT = 0.001
"""From this many seconds on, a wait becomes a span."""
_SAMPLED_BY_AGENT = frozenset(
    {StepKind.ENGINE, StepKind.TOOL, StepKind.POOL_QUEUE, StepKind.PAUSED_POOL, StepKind.AGENT}
)
_AFTER_AGENT = frozenset({StepKind.ARTIFACTS, StepKind.SANDBOX_END})
_QUEUES = frozenset({StepKind.PLACE, StepKind.WORKER, StepKind.HOST})

FindBackend = Callable[[str], BackendView | None]


@dataclass(slots=True)
class Agent:
    """The span of an agent, or of a sub-agent in a lane of its own."""

    span: Span
    last: float
    """When its last step ended."""


@dataclass(slots=True)
class StageSpan:
    stage: Stage
    span: Span
    queued: float = 0.0
    agents: dict[str, Agent] = field(default_factory=dict)


class AttemptTrace:
    def __init__(self, tracer: Tracer, activity: Activity, root: Span, find: FindBackend) -> None:
        """`root` is the attempt's own span, which ends with the attempt."""
        self._tracer = tracer
        self._activity = activity
        self._find = find
        self._epoch = activity.started_at - activity.started
        self._stage: StageSpan | None = None
        self._steps: dict[OpenStep, Span] = {}
        self.root = root
        self.is_recording = root.is_recording()

    def opened(self, step: OpenStep) -> None:
        """Begin the span of a step, and those of its stage and agent if it is their first."""
        if not self.is_recording:
            if step.kind is StepKind.ENGINE:
                step.traceparent = traceparent_of(self.root)
            return
        self._enter_stage(step)
        if step.kind in names.WAITS:
            return
        parent = self._parent(step)
        if step.kind is StepKind.ENGINE:
            span = self._begin_turn(step, parent)
            step.traceparent = traceparent_of(span)
        elif step.kind is StepKind.TOOL:
            attributes = {names.OPERATION: names.EXECUTE_TOOL, names.TOOL_NAME: step.name, names.TOOL_TYPE: "function"}
            span = self._begin(f"{names.EXECUTE_TOOL} {step.name}", parent, step.started, attributes)
        else:
            span = self._begin(f"{names.WORK[step.kind]} {step.name}".rstrip(), parent, step.started)
        self._steps[step] = span

    def closed(self, step: OpenStep) -> None:
        """End the span of a step; a wait becomes one only now, if it was long enough."""
        if not self.is_recording:
            return
        ended = step.ended or step.started
        if step.kind in names.WAITS:
            if self._stage is not None and step.kind in _QUEUES:
                self._stage.queued += ended - step.started
            if ended - step.started < SHORTEST_WAIT:
                return
            name = f"{names.WAITS[step.kind]}: {step.name}" if step.name else names.WAITS[step.kind]
            span = self._begin(name, self._parent(step), step.started)
        else:
            span = self._steps.pop(step)
        if self._stage is not None and (agent := self._stage.agents.get(_agent_of(step))) is not None:
            agent.last = max(agent.last, ended)
        self._describe(span, step)
        span.end(self._time(ended))

    def finish(self, ended: float) -> None:
        if self.is_recording:
            for span in self._steps.values():
                span.end(self._time(ended))
            self._steps.clear()
            self._leave_stage(ended)
            outcome = self._activity.outcome
            for key, name in (("reward", names.REWARD), ("stop_reason", names.STOP_REASON)):
                if key in outcome:
                    self.root.set_attribute(name, _plain(outcome[key]))
            self.root.set_attribute(names.STATE, str(outcome.get("state", "queued")))
            if code := outcome.get("code"):
                _fail(self.root, str(code))
        self.root.end(self._time(ended))

    # -- stages and agents ---------------------------------------------------------

    def _enter_stage(self, step: OpenStep) -> None:
        """Begin a stage with its first step, which is always the wait for a place."""
        now = self._stage
        if step.stage is None or (now is not None and now.stage is step.stage and step.kind is not StepKind.PLACE):
            return
        self._leave_stage(step.started)
        span = self._begin(f"stage {step.stage}", self.root, step.started)
        self._stage = StageSpan(step.stage, span)

    def _leave_stage(self, at: float) -> None:
        stage, self._stage = self._stage, None
        if stage is None:
            return
        self._end_agents(stage)
        stage.span.set_attribute(names.QUEUED_SECONDS, round(stage.queued, 6))
        stage.span.end(self._time(at))

    def _end_agents(self, stage: StageSpan) -> None:
        for agent in stage.agents.values():
            agent.span.end(self._time(agent.last))
        stage.agents.clear()

    def _parent(self, step: OpenStep) -> Span:
        """Return the span around a step: that of another step, the agent, the stage, or the attempt."""
        around = self._around(step, step.lane)
        if around is not None:
            return around
        stage = self._stage
        if stage is None:
            return self.root
        if stage.stage is not Stage.ROLLOUT:  # such as a vote of a judge, which has a lane of its own
            return self._around(step, "") or stage.span
        if step.kind in _AFTER_AGENT and not step.lane:
            self._end_agents(stage)
        agent = stage.agents.get(_agent_of(step))
        if agent is not None:
            return agent.span
        return self._begin_agent(stage, step).span if step.kind in _SAMPLED_BY_AGENT else stage.span

    def _around(self, step: OpenStep, lane: str) -> Span | None:
        for other in reversed(self._activity.open):
            if other is not step and other.lane == lane and other in self._steps:
                return self._steps[other]
        return None

    def _begin_agent(self, stage: StageSpan, step: OpenStep) -> Agent:
        environment, lane = self._activity.environment, _agent_of(step)
        name = f"{environment}/{lane}" if lane else environment
        main = stage.agents.get("")
        attributes = {
            names.OPERATION: names.INVOKE_AGENT,
            names.AGENT_NAME: name,
            names.CONVERSATION_ID: self._activity.rollout_id,
        }
        parent = main.span if lane and main is not None else stage.span
        span = self._begin(f"{names.INVOKE_AGENT} {name}", parent, step.started, attributes)
        return stage.agents.setdefault(lane, Agent(span, step.started))

    # -- spans ---------------------------------------------------------------------

    def _begin_turn(self, step: OpenStep, parent: Span) -> Span:
        backend = self._find(step.name)
        model = backend.model_path if backend is not None else step.name
        attributes: dict[str, AttributeValue] = {
            names.OPERATION: names.CHAT,
            names.REQUEST_MODEL: model,
            names.CONVERSATION_ID: self._activity.rollout_id,
            names.BACKEND: step.name,
        }
        if backend is not None:
            attributes |= names.server_attributes(backend)
        return self._begin(f"{names.CHAT} {model}", parent, step.started, attributes, SpanKind.CLIENT)

    def _begin(
        self,
        name: str,
        parent: Span,
        at: float,
        attributes: Mapping[str, AttributeValue] | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> Span:
        context = set_span_in_context(parent, Context())
        return self._tracer.start_span(
            name, context, kind, attributes, start_time=self._time(at), set_status_on_exception=False
        )

    def _describe(self, span: Span, step: OpenStep) -> None:
        if step.kind is StepKind.ENGINE:
            span.set_attributes(names.request_attributes(step.request) | names.answer_attributes(step.answer))
        for key, name in names.NOTED.items():
            if (value := step.detail.get(key)) is not None:
                span.set_attribute(name, _plain(value))
        if step.kind is StepKind.GRADER and (reward := step.detail.get("reward")) is not None:
            score: dict[str, AttributeValue] = {
                names.EVALUATION_NAME: step.name,
                names.EVALUATION_SCORE: float(reward),
            }
            span.add_event(names.EVALUATION, score, self._time(step.ended or step.started))
        if step.error is not None:
            _fail(span, step.error)

    def _time(self, reading: float) -> int:
        return int((self._epoch + reading) * 1e9)


def traceparent_of(span: Span) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _agent_of(step: OpenStep) -> str:
    """Return a sub-agent's number, or an empty text: lanes of simultaneous calls have no agent."""
    return step.lane if step.lane.isdigit() else ""


def _fail(span: Span, code: str) -> None:
    span.set_attribute(names.ERROR_TYPE, code)
    if code != "cancelled":
        span.set_status(Status(StatusCode.ERROR, code))


def _plain(value: object) -> AttributeValue:
    return value if isinstance(value, bool | int | float) else str(value)


REMEMBERED_ATTEMPTS = 10_000
"""Rollouts whose last attempt is remembered, for the link from the next."""
BACKENDS_SECONDS = 10.0

_W3C = TraceContextTextMapPropagator()


class TraceObserver(StepObserver):
    def __init__(self, tracer: Tracer, ids: RolloutIds, backends: Callable[[], Iterable[BackendView]] = tuple) -> None:
        self._tracer = tracer
        self._ids = ids
        self._backends = BackendCache(backends)
        self._attempts: dict[Activity, AttemptTrace] = {}
        self._last: OrderedDict[str, SpanContext] = OrderedDict()

    def began(self, activity: Activity) -> None:
        root = self._begin(activity)
        activity.trace_id = f"{root.get_span_context().trace_id:032x}"
        self._attempts[activity] = AttemptTrace(self._tracer, activity, root, self._backends.find)

    def opened(self, activity: Activity, step: OpenStep) -> None:
        if (trace := self._attempts.get(activity)) is not None:
            trace.opened(step)

    def closed(self, activity: Activity, step: OpenStep) -> None:
        if (trace := self._attempts.get(activity)) is not None:
            trace.closed(step)

    def finished(self, activity: Activity) -> None:
        trace = self._attempts.pop(activity)
        trace.finish(time.perf_counter())
        self._last[activity.rollout_id] = trace.root.get_span_context()
        self._last.move_to_end(activity.rollout_id)
        if len(self._last) > REMEMBERED_ATTEMPTS:
            self._last.popitem(last=False)

    def _begin(self, activity: Activity) -> Span:
        caller = _caller(activity.trace)
        is_link = activity.trace is not None and activity.trace.link
        links = []
        if (previous := self._last.get(activity.rollout_id)) is not None:
            links.append(Link(previous, {names.LINK: "previous_attempt"}))
        if is_link and caller is not None:
            links.append(Link(get_current_span(caller).get_span_context(), {names.LINK: "order"}))
        parent = Context() if is_link or caller is None else caller
        self._ids.next_trace = trace_id_of(activity.rollout_id)
        try:
            return self._tracer.start_span(
                f"rollout {activity.environment}",
                parent,
                attributes=_attributes(activity),
                links=links,
                start_time=int(activity.started_at * 1e9),
            )
        finally:
            self._ids.next_trace = None


class BackendCache:
    """The engines by id, so that a turn does not list them all."""

    def __init__(self, backends: Callable[[], Iterable[BackendView]]) -> None:
        self._backends = backends
        self._known: dict[str, BackendView] = {}
        self._listed = -BACKENDS_SECONDS

    def find(self, backend_id: str) -> BackendView | None:
        """Return an engine as it was some seconds ago."""
        now = time.monotonic()
        if now - self._listed > BACKENDS_SECONDS or backend_id not in self._known:
            self._known = {view.backend_id: view for view in self._backends()}
            self._listed = now
        return self._known.get(backend_id)


def _run_of(activity: Activity) -> tuple[str, int] | None:
    if activity.run_id is not None and activity.group is not None:
        return activity.run_id, activity.group
    try:
        sample = SampleId.parse(activity.rollout_id)
    except ValueError:
        return None
    return sample.run, sample.number


def _caller(trace: TraceContext | None) -> Context | None:
    """Return the caller's span as a context; None if there is none, or its ids are all zeros."""
    if trace is None:
        return None
    carrier = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
    context = _W3C.extract(carrier, Context())
    return context if get_current_span(context).get_span_context().is_valid else None


def _attributes(activity: Activity) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.ROLLOUT_ID: activity.rollout_id,
        names.ENVIRONMENT: activity.environment,
        names.ATTEMPT: activity.attempt,
    }
    if (run := _run_of(activity)) is not None:
        attributes[names.RUN], attributes[names.GROUP] = run
    return attributes
