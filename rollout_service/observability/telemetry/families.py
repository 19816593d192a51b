"""Families of metrics that are made whenever the metrics are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)


def filled(family: F, values: Mapping[Any, float]) -> F:
    """Add values by their label, or by several labels in a tuple."""
    for labels, value in values.items():
        family.add_metric(labels if isinstance(labels, tuple) else (labels,), value)
    return family
