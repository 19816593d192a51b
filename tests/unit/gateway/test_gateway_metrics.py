"""What programs make up adds a bounded number of time series, and takes none from what is known."""

from collections import Counter

from prometheus_client import CollectorRegistry

from rollout_service.gateway.contract import Dialect, Lane, ModelCall
from rollout_service.gateway.metrics import MAX_CLIENTS, CallOutcome, GatewayMetrics
from tests.support.gateway.asgi import CONTEXT, PATHS, gateway_bench


def labels(registry: CollectorRegistry, metric: str, label: str) -> set[str]:
    samples = [sample for family in registry.collect() for sample in family.samples]
    return {sample.labels[label] for sample in samples if sample.name == metric}


def test_names_that_a_program_makes_up_are_counted_together():
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    for number in range(300):
        made_up = (f"junk{number}", f"tools[type=junk{number}]", f"junk{number}[type=x]")
        call = ModelCall(dialect=Dialect.CHAT, model="m", messages=(), ignored=made_up, lane=Lane(f"c{number}"))
        metrics.count_call(call, CallOutcome.ANSWERED)
    real = ModelCall(
        dialect=Dialect.ANTHROPIC,
        model="m",
        messages=(),
        requested={"temperature": 1.0, "reasoning_effort": "high"},
        ignored=("metadata", "messages[].content[type=x]"),
        lane=Lane("claude_code"),
    )
    metrics.count_call(real, CallOutcome.ANSWERED)
    parameters = labels(registry, "rollout_gateway_parameters_total", "parameter")
    assert parameters == {"other", "tools[]", "temperature", "reasoning_effort", "metadata", "messages[]"}
    clients = labels(registry, "rollout_gateway_calls_total", "client")
    assert "claude_code" in clients
    assert len(clients) == MAX_CLIENTS + len({"other", "claude_code"})


async def test_a_call_is_counted_once_whatever_becomes_of_it(renderer):
    async with gateway_bench(renderer) as b:
        ended = {"messages": [{"role": "user", "content": "hi"}]}
        overflow = {"messages": [{"role": "user", "content": "hi " * 20 * CONTEXT}]}
        named = {"input": [{"type": "item_reference", "id": "msg_nobody_0"}, {"role": "user", "content": "hi"}]}
        for status, body in ((200, ended), (400, overflow), (400, {"messages": []}), (400, named), (410, ended)):
            if status == 410:
                await b.session.end()
            dialect = Dialect.RESPONSES if body is named else Dialect.CHAT
            assert (await b.post(PATHS[dialect], body)).status_code == status
        calls = b.session._place.metrics._calls.collect()
        samples = [each for each in calls[0].samples if each.name.endswith("_total")]
        counts = Counter[str]()
        for each in samples:
            counts[each.labels["outcome"]] += int(each.value)
    assert counts == {"answered": 1, "overflow": 1, "refused": 3}
