"""The choices that `rollout-service demo` offers."""

from __future__ import annotations

from enum import StrEnum


class DemoEngine(StrEnum):
    """What serves the policy."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"


class DemoSandbox(StrEnum):
    """Where tools run."""

    APPTAINER = "apptainer"
    LOCAL = "local"


class DemoPolicy(StrEnum):
    """The shipped policies."""

    TUNED = "calc-tuned"
    BASE = "calc-base"
