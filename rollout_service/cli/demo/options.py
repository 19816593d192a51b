"""The choices that `rollout-service demo` offers."""

from __future__ import annotations

from enum import StrEnum


class DemoEngine(StrEnum):
    """The engines that can serve the policy."""

    EMBEDDED = "embedded"
    SGLANG = "sglang"


class DemoSandbox(StrEnum):
    """The providers of sandboxes that tools can run in."""

    APPTAINER = "apptainer"
    LOCAL = "local"


class DemoPolicy(StrEnum):
    """The shipped policies."""

    TUNED = "calc-tuned"
    BASE = "calc-base"
