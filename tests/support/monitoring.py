"""What is below `deploy/monitoring`, the names of metrics in expressions, and the programs of Prometheus."""

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy/monitoring"
ENGINES = frozenset(
    {
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "sglang:token_usage",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
    }
)
"""The engines' own metrics that the board shows."""
_NOT_NAMES = re.compile(
    r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|\b(?:by|without|on|ignoring|group_left|group_right) *\([^)]*\)|\b\d\S*|offset'
)
_NAME = re.compile(r"[a-zA-Z_:][\w:]*(?! *\(|\w)")
_WORDS = frozenset({"and", "or", "unless", "by", "on", "sum", "max", "min", "count", "topk"})


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`."""
    found = shutil.which(name) or str(ROOT / ".cache/prometheus/bin" / name)
    assert Path(found).exists(), "unpack Prometheus with scripts/install-prometheus"
    return found


def make_board() -> ModuleType:
    """Return the script that makes the board."""
    spec = importlib.util.spec_from_file_location("make_board", MONITORING / "make_board.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def board_queries() -> list[str]:
    """Return the expressions of the board, with its variables filled in for all nodes and runs."""
    found: list[str] = make_board().queries()
    return [
        expression.replace("$__rate_interval", "1m").replace("$node", ".*").replace("$run", ".*")
        for expression in found
    ]


def rules() -> list[dict[str, Any]]:
    """Return the recording rules and the alerts."""
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def metric_names(expression: str) -> set[str]:
    """Return the names of the metrics in an expression, without the suffixes of histograms."""
    bare = _NOT_NAMES.sub(" ", expression)
    names = set(_NAME.findall(bare)) - _WORDS
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
