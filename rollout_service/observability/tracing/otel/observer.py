"""Makes a trace of every rollout from the steps of its attempts.

A rollout is one trace, over all its attempts. It continues the caller's trace if one came with the request, with that
trace's decision whether to record it. The rollouts of a run, of which there may be a million, have traces of their own
that link to the order.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from api_schemas.base import TraceContext
from api_schemas.inference import BackendView
from rollout_service.activity import Activity, OpenStep, StepObserver
from rollout_service.base.ids import SampleId
from rollout_service.observability.tracing.otel import conventions as names
from rollout_service.observability.tracing.otel.attempt import AttemptTrace
from rollout_service.observability.tracing.otel.conventions import RolloutIds, trace_id_of

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
