"""Routing decisions are counted, and explained at debug level only."""

import structlog
from prometheus_client import CollectorRegistry, generate_latest

from rollout_service.engines.routing import Cost, Decision, Reason
from rollout_service.observability.telemetry.engines import RoutingTrace

COST = Cost(backend_id="b0", held_tokens=64, wait=0.1, prefill=0.2, move=0.0, contention=0.3)
DECISION = Decision(
    backend_id="b0", reason=Reason.HOME, affinity="r", prompt_tokens=100, held_tokens=64, costs=(COST,)
)


def test_decisions_and_tokens_are_counted():
    registry = CollectorRegistry()
    trace = RoutingTrace(registry)
    trace.decided("policy", DECISION)
    trace.served("policy", DECISION, 80)
    text = generate_latest(registry).decode()
    assert 'rollout_routing_decisions_total{pool="policy",reason="home"} 1.0' in text
    for kind, count in {"sent": 100, "expected": 64, "cached": 80}.items():
        assert f'rollout_routing_prompt_tokens_total{{kind="{kind}",pool="policy"}} {count}.0' in text
    assert 'rollout_routing_prediction_error_bucket{le="0.2",pool="policy"} 1.0' in text


def test_at_debug_level_a_decision_is_explained_and_otherwise_nothing_is_written(caplog):
    trace = RoutingTrace(CollectorRegistry())
    with structlog.testing.capture_logs() as events:
        caplog.set_level("INFO", logger="rollout_service.observability.telemetry.engines")
        trace.decided("policy", DECISION)
        assert events == []
        caplog.set_level("DEBUG", logger="rollout_service.observability.telemetry.engines")
        trace.decided("policy", DECISION)
    (event,) = events
    assert (event["event"], event["rollout_id"], event["reason"]) == ("routed", "r", "home")
    (candidate,) = event["candidates"]
    assert candidate["backend_id"] == "b0"
    assert candidate["total"] == COST.total
