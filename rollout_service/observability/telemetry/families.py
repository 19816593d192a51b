"""Families of metrics that are made whenever the metrics are read.

Values are given by their label, or by several labels in a tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

F = TypeVar("F", CounterMetricFamily, GaugeMetricFamily)


@dataclass(frozen=True, slots=True)
class Collected(Collector):
    """The metrics that a function makes whenever they are read."""

    collect: Callable[[], Iterable[Metric]]


def counter(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> CounterMetricFamily:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def gauge(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> GaugeMetricFamily:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _filled(family: F, values: Mapping[Any, float]) -> F:
    for labels, value in values.items():
        family.add_metric(labels if isinstance(labels, tuple) else (labels,), value)
    return family
