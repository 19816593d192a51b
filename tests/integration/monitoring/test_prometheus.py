"""The real Prometheus reads a service's metrics, and every query of the board finds data there."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import monitoring
from tests.support.processes.children import killed
from tests.support.processes.service import Running, eventually, scripted_engine, service

pytestmark = pytest.mark.prometheus

WITHOUT_DATA = {
    "rollout_live_held_seconds": "only once a session was held by a paused pool",
    "rollout_live_satisfied_share": "only once a turn of a session has a value",
    **dict.fromkeys(monitoring.ENGINES, "the engine's own metrics, and no engine is scraped here"),
}
"""Metrics of queries that find nothing here, and why."""


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [monitoring.program("promtool"), *arguments], input=text, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("watched")
    with scripted_engine(folder, delay=0.01) as engine, service(folder, engine.url) as running:
        yield running


@pytest.fixture(scope="module")
def idle(server: Running) -> str:
    """The metrics before any work."""
    return httpx.get(f"{server.url}/metrics", timeout=30).text


@pytest.fixture(scope="module")
def loaded(server: Running, idle: str) -> str:
    """The metrics after rollouts that ended, with a run in progress."""
    with httpx.Client(base_url=server.url, timeout=60) as api:
        tasks = [{"environment": "echo", "instance": {"number": number}} for number in range(8)]
        run = {"run_id": "watched", "group_size": 2, "batch_size": 2}
        made = api.post("/v1/runs", json=run | {"source": {"kind": "inline", "tasks": tasks, "open": True}})
        assert made.is_success, made.text
        for number in range(4):
            body = {"task": tasks[number]}
            assert api.post("/v1/rollouts", json=body, params={"wait": 60}).json()["state"] == "completed"
        weights = {"path": "/weights/1", "version": 1}
        assert api.post("/v1/weights", json=weights).is_success
        return api.get("/metrics").text


def test_the_metrics_of_an_idle_and_of_a_busy_service_are_well_formed(idle, loaded):
    for text in (idle, loaded):
        checked = promtool("check", "metrics", text=text)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_every_metric_of_the_board_and_the_alerts_is_served(loaded):
    served = {line.split()[2] for line in loaded.splitlines() if line.startswith("# TYPE ")}
    expressions = [*monitoring.board_queries(), *(rule["expr"] for rule in monitoring.rules())]
    wanted = {name for expression in expressions for name in monitoring.metric_names(expression)}
    recorded = {rule.get("record") for rule in monitoring.rules()}
    assert wanted - served <= monitoring.ENGINES | recorded | {"up", "ALERTS"}


def test_the_rules_are_valid_and_each_alert_fires_when_it_should():
    for arguments in (("check", "rules", "alerts.yml"), ("test", "rules", "alerts_test.yml")):
        checked = promtool(*arguments[:2], str(monitoring.MONITORING / arguments[2]))
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_example_of_a_configuration_is_valid():
    checked = promtool("check", "config", str(monitoring.MONITORING / "prometheus.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_queries_of_the_board_are_valid(tmp_path):
    queries = enumerate(monitoring.board_queries())
    rules = [{"record": f"query:{number}", "expr": expression} for number, expression in queries]
    file = tmp_path / "board.yml"
    file.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    checked = promtool("check", "rules", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules)} rules found" in checked.stdout


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """Run a Prometheus that scrapes a service and evaluates the rules."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(monitoring.MONITORING / "alerts.yml")],
        "scrape_configs": [{"job_name": "rollout-service", "static_configs": [{"targets": [target]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [
        monitoring.program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    log = folder / "log"
    with log.open("wb") as output, killed(subprocess.Popen(command, stdout=output, stderr=output)):
        eventually(lambda: "Server is ready" in log.read_text(), log)
        (address,) = re.findall(r'"Listening on" address=(\S+)', log.read_text())
        client = httpx.Client(base_url=f"http://{address}/api/v1", timeout=30)
        try:
            yield client
        finally:
            client.close()


def ask(api: httpx.Client, expression: str) -> list[Any]:
    """Return the samples of a query now."""
    answer = api.get("/query", params={"query": expression})
    assert answer.is_success, answer.text
    found: list[Any] = answer.json()["data"]["result"]
    return found


def test_every_query_of_the_board_returns_data(server, loaded, tmp_path):
    with prometheus(tmp_path, server.url.removeprefix("http://")) as api, httpx.Client() as service_api:
        deadline = time.monotonic() + 60
        # Rates need two scrapes, with work in between.
        while not ask(api, "sum(rate(rollout_finished_total[1m])) > 0") and time.monotonic() < deadline:
            body = {"task": {"environment": "echo", "instance": {"number": 1}}}
            service_api.post(f"{server.url}/v1/rollouts", json=body, params={"wait": 30}, timeout=60)
            time.sleep(0.5)
        empty = {expression for expression in monitoring.board_queries() if not ask(api, expression)}
        explained = {query for query in empty if monitoring.metric_names(query) & WITHOUT_DATA.keys()}
        assert empty == explained
        assert ask(api, "sum(rate(rollout_finished_total[1m])) > 0")
        alerts = api.get("/alerts").json()["data"]["alerts"]
        assert [alert for alert in alerts if alert["state"] == "firing"] == []
