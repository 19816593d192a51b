"""The spans of one attempt at a rollout: its stages, its agents, and their steps.

Every span has ended once `finish` has returned, and none outlives its parent's stage. An attempt that is not sampled
costs one span that is not recorded, whose ids engines still get. Times are those of the steps, whenever a span is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from api_schemas.inference import BackendView
from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import Activity, OpenStep
from rollout_service.engines.contract import GenerateRequest, Generation
from rollout_service.observability.tracing.otel import conventions as names

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
            attributes |= server_attributes(backend)
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
            span.set_attributes(request_attributes(step.request) | answer_attributes(step.answer))
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


# Attributes of requests to engines. Prompts and answers are never among them.

_PORTS = {"http": 80, "https": 443}


def server_attributes(backend: BackendView) -> dict[str, AttributeValue]:
    parts = urlsplit(backend.url)
    return {
        names.PROVIDER: str(backend.kind),
        names.SERVER_ADDRESS: parts.hostname or "",
        names.SERVER_PORT: parts.port or _PORTS.get(parts.scheme, 0),
    }


def request_attributes(request: object) -> dict[str, AttributeValue]:
    if not isinstance(request, GenerateRequest):
        return {}
    sampling = request.sampling
    attributes: dict[str, AttributeValue] = {
        names.REQUEST_TEMPERATURE: sampling.temperature,
        names.REQUEST_TOP_P: sampling.top_p,
        names.REQUEST_MAX_TOKENS: sampling.max_new_tokens,
    }
    if sampling.seed is not None:
        attributes[names.REQUEST_SEED] = sampling.seed
    return attributes


def answer_attributes(answer: object) -> dict[str, AttributeValue]:
    if not isinstance(answer, Generation):
        return {}
    attributes: dict[str, AttributeValue] = {
        names.FINISH_REASONS: [str(answer.finish_reason)],
        names.INPUT_TOKENS: answer.prompt_tokens,
        names.OUTPUT_TOKENS: len(answer.output_ids),
        names.CACHED_TOKENS: answer.cached_tokens,
    }
    if answer.versions:
        attributes[names.WEIGHT_VERSION] = answer.versions[-1]
    return attributes
