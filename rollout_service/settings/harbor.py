"""The settings of tasks in Harbor's format."""

from __future__ import annotations

from typing import Literal

from rollout_service.settings.values import Hosts, Names, Section


class HarborSettings(Section):
    """The rights of tasks in Harbor's format, and the grading of those without a verifier of their own."""

    public_network: Hosts = "none"
    """The network of a task that asks for a public one: `none`, a list of hosts, or `full`, which includes this
    machine's own services."""
    harness: str | None = None
    """The program that is the agent of all tasks, such as `codex`; their images must have it. None: the built-in."""
    variables: Names = []
    """The variables of this machine that tasks may read, such as `${NAME}` in an `env`. They reach hostile code."""
    shared_verifier: Literal["fresh", "same"] = "fresh"
    """Where a shared verifier runs: in a fresh sandbox with the working folder and `artifacts`, which an agent cannot
    forge, or in the agent's own, as Harbor has it."""
    agent_processes: Literal["keep", "end"] = "keep"
    """Whether processes that the agent left running, such as a server, go on while a shared verifier runs in its own
    sandbox, as Harbor has it, or are ended. A process that goes on can forge the reward."""
    artifacts: Names = ["/app", "/data", "/home", "/srv"]
    """Paths that a shared verifier in a fresh sandbox gets besides the working folder and the task's own artifacts."""
