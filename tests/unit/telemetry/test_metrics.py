"""Each recording method of the metrics leads to a sample of the metric that it names."""

import pytest

from api_schemas.errors import Boundary, ErrorInfo
from api_schemas.rollouts import RolloutState, Stage
from rollout_service.observability.telemetry.metrics import Metrics
from sandboxes.egress.messages import EgressCounts
from tests.support import samples
from tests.support.sub_agents import DIRECT, SERIAL, WIDE, rollout

ERROR = ErrorInfo(code="store_failed", message="m", boundary=Boundary.STORE, retryable=True)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def test_each_metric_has_a_help_text(metrics):
    texts = [metric.documentation for metric in metrics.registry.collect()]
    assert all(text and not text.endswith(".") for text in texts)


def test_rollouts_and_runs_are_counted(metrics):
    metrics.count_finished(samples.rollout(state=RolloutState.CANCELLED))
    metrics.count_failure(ERROR)
    metrics.count_retry(ERROR)
    metrics.count_lost_lease()
    metrics.count_stopped_run(ERROR)
    metrics.set_run("math", {"open": 3}, 0.5, backlog=7)
    text = metrics.render().decode()
    for sample in (
        'rollout_finished_total{environment="calc",state="cancelled",stop_reason=""} 1.0',
        f'rollout_errors_total{{boundary="{ERROR.boundary}",code="store_failed",stage=""}} 1.0',
        'rollout_retries_total{code="store_failed"} 1.0',
        "rollout_lost_leases_total 1.0",
        'rollout_run_problems_total{code="store_failed"} 1.0',
        'rollout_run_groups{run="math",state="open"} 3.0',
        'rollout_run_acceptance_rate{run="math"} 0.5',
        'rollout_backlog{run="math"} 7.0',
    ):
        assert sample in text
    metrics.clear_run("math")
    assert 'run="math"' not in metrics.render().decode()


def test_the_use_of_sub_agents_is_counted_while_a_run_is_in_progress(metrics):
    metrics.set_run("pointers", {"open": 1}, 0.5)
    metrics.parallel.observe("pointers", [rollout(WIDE), rollout(DIRECT, 0.0), rollout(SERIAL, 0.5)])
    metrics.parallel.observe("pointers", [rollout(WIDE, None), rollout(None)])
    metrics.parallel.observe("math", [rollout(None)])
    text = metrics.render().decode()
    for sample in (
        'rollouts_total{assigned="yes",run="pointers",solved="yes"} 1.0',
        'rollouts_total{assigned="yes",run="pointers",solved="no"} 1.0',
        'rollouts_total{assigned="no",run="pointers",solved="no"} 1.0',
        'assigns_total{outcome="valid",run="pointers"} 4.0',
        'assigns_total{outcome="max_turns",run="pointers"} 1.0',
        'assigns_total{outcome="over_cap",run="pointers"} 1.0',
        'assigns_total{outcome="refused",run="pointers"} 0.0',
        'duplicates_total{run="pointers"} 1.0',
        'amounts_total{kind="direct_calls",run="pointers"} 4.0',
        'amounts_total{kind="subagent_tokens",run="pointers"} 150.0',
        'steps_sum{kind="critical",run="pointers"} 19.0',
        'steps_bucket{kind="total",le="8.0",run="pointers"} 1.0',
        'width_count{run="pointers"} 2.0',
        'balance_count{run="pointers"} 1.0',
        'seconds_sum{kind="active",run="pointers"} 10.0',
    ):
        assert f"rollout_parallel_{sample}" in text
    assert "math" not in text
    metrics.clear_run("pointers")
    assert 'run="pointers"' not in metrics.render().decode()


def test_series_with_known_labels_exist_before_anything_has_happened(metrics):
    metrics.expect(["calc", "math"])
    text = metrics.render().decode()
    for sample in (
        'rollout_stage_active{stage="evaluate"} 0.0',
        'rollout_stage_seconds_count{stage="rollout"} 0.0',
        'rollout_finished_total{environment="math",state="failed",stop_reason=""} 0.0',
        'rollout_sandbox_holds_total{resource="disk"} 0.0',
        'rollout_sandbox_acquire_seconds_count{start="cold"} 0.0',
        'rollout_tokens_total{kind="sampled"} 0.0',
        'rollout_event_readers{stream="events"} 0.0',
    ):
        assert sample in text


def test_environments_without_a_rollout_have_few_series(metrics):
    metrics.expect(f"task-{number}" for number in range(10_000))
    assert metrics.render().count(b"rollout_finished_total{") == 300


def test_readers_of_streams_are_counted_while_they_read(metrics):
    def read_until_the_connection_is_lost() -> None:
        with metrics.track_reader("events"):
            assert 'rollout_event_readers{stream="events"} 1.0' in metrics.render().decode()
            raise ConnectionError

    with pytest.raises(ConnectionError):
        read_until_the_connection_is_lost()
    assert 'rollout_event_readers{stream="events"} 0.0' in metrics.render().decode()


def test_stages_sandboxes_and_connections_are_counted(metrics):
    metrics.watch_stage(Stage.INIT, {"workers": lambda: 4})
    metrics.observe_queue_seconds(Stage.INIT, 0.2)
    metrics.watch_sandboxes({"warm": lambda: 2})
    metrics.watch_egress(lambda: EgressCounts(connections=5))
    metrics.watch_use(lambda: 7.5)
    metrics.watch_connections(lambda: {"pending": 1})
    metrics.acquired(warm=True, seconds=0.003)
    metrics.refill_failed()
    metrics.held_back("memory")
    metrics.count_limit_violation("disk")
    metrics.count_request("GET", "/ready", 200)
    metrics.count_key_reload(succeeded=False)
    metrics.note_certificate(is_usable=False)
    metrics.count_refused_connection("head_timeout")
    with metrics.track_waiting(Stage.INIT), metrics.track_work(Stage.INIT):
        text = metrics.render().decode()
    for sample in (
        'rollout_stage_limit{kind="workers",stage="init"} 4.0',
        'rollout_stage_queue_seconds_count{stage="init"} 1.0',
        'rollout_stage_waiting{stage="init"} 1.0',
        'rollout_stage_active{stage="init"} 1.0',
        'rollout_sandboxes{state="warm"} 2.0',
        "rollout_egress_connections_total 5.0",
        "rollout_sandbox_use_seconds_total 7.5",
        'rollout_http_connections{state="pending"} 1.0',
        'rollout_sandbox_acquire_seconds_count{start="warm"} 1.0',
        "rollout_sandbox_refill_failures_total 1.0",
        'rollout_sandbox_holds_total{resource="memory"} 1.0',
        'rollout_sandbox_breaches_total{limit="disk"} 1.0',
        'rollout_http_requests_total{method="GET",route="/ready",status="200"} 1.0',
        'rollout_key_reloads_total{outcome="failed"} 1.0',
        'rollout_http_refused_connections_total{reason="head_timeout"} 1.0',
        "rollout_keys_outdated 1.0",
        "rollout_certificate_outdated 1.0",
    ):
        assert sample in text
    metrics.count_key_reload(succeeded=True)
    assert "rollout_keys_outdated 0.0" in metrics.render().decode()
    assert 'rollout_stage_active{stage="init"} 0.0' in metrics.render().decode()
