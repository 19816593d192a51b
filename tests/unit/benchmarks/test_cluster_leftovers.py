"""`chaos.py` counts every key of the store as a leftover, except those of nodes and engines."""

from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.slow
def test_keys_of_rollouts_and_runs_are_told_from_those_of_nodes(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)  # benchmarks find each other there
    is_of_work = import_module("support.cluster_leftovers").is_of_work
    of_rollouts = (
        "r:r-1",
        "y:r-1",
        "ids",
        "bits:e:echo:0",
        "bits:w",
        "since:policy",
        "queues",
        "ended",
        "segments:bytes",
    )
    of_runs = ("run:chaos", "run:chaos:closed", "runs", "runs:active")
    of_nodes = ("node:n1", "nodes_alive", "leader:runs", "idle:policy", "backends:order", "pool:policy:held")
    assert [key for key in (*of_rollouts, *of_runs, "a kind that is new") if not is_of_work(key)] == []
    assert [key for key in (*of_nodes, "events", "meta", "runs:last", "rollouts:last") if is_of_work(key)] == []
