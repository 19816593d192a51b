"""The board and the alerts are made of metrics that exist, and each alert says what to look at first."""

import json
import re

import pytest
import yaml

from tests.support import monitoring

RULES = monitoring.rules()
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
OTHERS = {"up", "ALERTS"}
"""What Prometheus adds itself."""


def documented() -> set[str]:
    """Return the names on the page of metrics, which another test compares with the code."""
    page = (monitoring.ROOT / "docs/reference/metrics-and-log.md").read_text()
    return set(re.findall(r"`(rollout_\w+)", page))


def test_the_board_is_what_its_script_makes():
    made = monitoring.make_board()
    assert json.loads(made.BOARD.read_text()) == made.board(), "run deploy/monitoring/make_board.py"


def test_panels_neither_overlap_nor_share_an_id():
    panels = monitoring.make_board().board()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, panel["title"]
                assert x < 24
                cells.add((x, y))


def test_every_panel_is_explained_and_names_no_data_source_of_ours():
    for panel in monitoring.make_board().board()["panels"]:
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize(
    ("expression", "others"),
    [
        *((query, monitoring.ENGINES) for query in monitoring.board_queries()),
        *((rule["expr"], RECORDED) for rule in RULES),
    ],
)
def test_every_metric_of_the_board_and_the_rules_exists(expression, others):
    names = monitoring.metric_names(expression)
    assert names
    assert names <= documented() | others | OTHERS


def test_names_of_metrics_are_found_in_expressions():
    expression = 'sum by (a, le) (rate(x_bucket{b="y"}[5m])) / on (c) group_left () up > 4e9 or z offset 5m'
    assert monitoring.metric_names(expression) == {"x", "up", "z"}


def test_each_alert_has_series_with_which_it_fires_and_with_which_it_does_not():
    tests = yaml.safe_load((monitoring.MONITORING / "alerts_test.yml").read_text())["tests"]
    names = [test["name"] for test in tests]
    assert sorted(names) == sorted(f"{alert} {what}" for alert in ALERTS for what in ("fires", "is quiet"))
    for test in tests:
        (check,) = test["promql_expr_test"]
        assert check["expr"] == f'ALERTS{{alertname="{test["name"].split()[0]}",alertstate="firing"}}'
        assert bool(check["exp_samples"]) is test["name"].endswith(" fires")


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_each_alert_says_what_to_look_at_first_as_the_page_does(alert):
    found = ALERTS[alert]
    assert found["labels"]["severity"] in {"critical", "warning"}
    page, _, anchor = found["annotations"]["runbook"].partition("#")
    text = (monitoring.ROOT / page).read_text()
    assert anchor in {
        re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
        for line in text.splitlines()
        if line.startswith("#")
    }
    (line,) = [line for line in text.splitlines() if line.startswith(f"| `{alert}`")]
    assert found["annotations"]["look_first"] == re.sub(r"[`]", "", line.split("|")[3]).strip()
