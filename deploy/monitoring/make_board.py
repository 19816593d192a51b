#!/usr/bin/env python3
"""Write the Grafana board of the service, `grafana/rollout-service.json`, from `board.toml`.

  deploy/monitoring/make_board.py          write the file
  deploy/monitoring/make_board.py --check  fail if the file is not what this script writes

The board names no data source, which is chosen when it is imported. The script needs only Python.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PANELS = Path(__file__).with_name("board.toml")
BOARD = Path(__file__).with_name("grafana") / "rollout-service.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24


@dataclass(frozen=True)
class Panel:
    """A plot over time, or one number; `board.toml` says what the fields mean."""

    title: str
    text: str
    queries: list[tuple[str, str]]
    unit: str = "short"
    number: bool = False
    stacked: bool = False
    alarm: float | None = None
    low: bool = False
    limit: float | None = None

    @property
    def size(self) -> tuple[int, int]:
        """The width and the height, in units of Grafana's grid."""
        return (4, 4) if self.number else (8, 7)


def rows() -> list[tuple[str, list[Panel]]]:
    """Return the headings, each with its panels."""
    found = tomllib.loads(PANELS.read_text())["row"]
    return [(row["title"], [Panel(**panel) for panel in row["panel"]]) for row in found]


def board() -> dict[str, Any]:
    """Return the board as Grafana reads it."""
    return {
        "title": "Rollout service",
        "uid": "rollout-service",
        "description": "Rollouts, engines, sandboxes and runs of the rollout service.",
        "tags": ["rollout-service"],
        "schemaVersion": 36,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": list(_variables())},
        "annotations": {"list": [_alerts()]},
        "panels": list(_panels()),
    }


def queries() -> list[str]:
    """Return all expressions of the board."""
    return [expression for _, panels in rows() for panel in panels for expression, _ in panel.queries]


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    for name, label, metric in (
        ("node", "Node", "rollout_stage_limit"),
        ("run", "Run", "rollout_run_groups"),
    ):
        key = "instance" if name == "node" else name
        yield {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": f"label_values({metric}, {key})", "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "expr": 'ALERTS{alertstate="firing",alertname=~"Rollout.*"}',
        "titleFormat": "{{alertname}}",
        "iconColor": "red",
    }


def _panels() -> Iterator[dict[str, Any]]:
    top = number = 0
    for title, panels in rows():
        number += 1
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": place,
            "panels": [],
        }
        top, left, tallest = top + 1, 0, 0
        for panel in panels:
            width, height = panel.size
            if left + width > COLUMNS:
                top, left, tallest = top + tallest, 0, 0
            number += 1
            yield _panel(panel, number, {"x": left, "y": top, "w": width, "h": height})
            left, tallest = left + width, max(tallest, height)
        top += tallest


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "noValue": "none"}
    if panel.limit is not None:
        defaults["max"] = panel.limit
    if not panel.number:
        defaults["custom"] = {
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
    if panel.alarm is not None:
        colors = ("red", "green") if panel.low else ("green", "red")
        steps = [{"color": colors[0], "value": None}, {"color": colors[1], "value": panel.alarm}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        "id": number,
        "type": "stat" if panel.number else "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "range": True,
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.number:
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area", "colorMode": "value"}
    return {
        "legend": {"displayMode": "list", "placement": "bottom"},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def main() -> int:
    """Write or check the file."""
    text = json.dumps(board(), indent=1) + "\n"
    if "--check" in sys.argv[1:]:
        return 0 if BOARD.read_text() == text else 1
    if sys.argv[1:]:
        sys.stdout.write(__doc__ or "")
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    BOARD.parent.mkdir(exist_ok=True)
    BOARD.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
