"""The settings of the stages, of the sandboxes that rollouts get, and of tasks in Harbor's format."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollout_service.settings.values import Hosts, Names, Section
from sandboxes.config import PressureConfig, WarmPoolConfig


class PipelineSettings(Section):
    """How many rollouts each stage holds at once.

    At most init_workers + rollout_queue + rollout_workers + evaluate_workers sandboxes are alive at any time, plus
    evaluate_queue for environments that are scored in the agent's own sandbox.
    """

    init_queue: int = Field(32, ge=1)
    """The most rollouts that wait for an init worker, after they were leased from the store."""
    init_workers: int = Field(8, ge=1)
    """The most rollouts being set up at once: starting their sandboxes, and the sessions of their tools."""
    rollout_queue: int = Field(2, ge=1)
    """The most rollouts that wait for a rollout worker, with their sandbox ready."""
    rollout_workers: int = Field(16, ge=1)
    """The most agents running at once."""
    evaluate_queue: int = Field(256, ge=1)
    """The most rollouts that wait for an evaluate worker, with their agent ended."""
    evaluate_workers: int = Field(4, ge=1)
    """The most rollouts being scored at once."""
    subagent_slots: int = Field(64, ge=1)
    """The most sub-agents at work at once, over all agents; agents get their slots in turn."""
    artifacts_bytes: int = Field(8 * 1024**3, ge=16 * 1024**2)
    """The most space that agents' artifacts may take on the host's temporary disk until they are scored; when it is
    full, rollouts wait for room."""
    max_attempts: int = Field(3, ge=1)
    """The most attempts at one rollout, including the first; only infrastructure failures are retried."""
    retry_seconds: float = Field(0.5, ge=0)
    """The wait before the second attempt; it doubles with every further attempt."""
    lease_seconds: float = Field(30.0, gt=0)
    """How long a rollout stays leased to a service that has stopped renewing the lease."""
    resume: bool = True
    """Whether a rollout that a crash or a shutdown interrupted continues from its last whole turn. For this, turns are
    saved in the background."""
    drain_seconds: float = Field(10.0, ge=0)
    """How long a shutdown waits for rollouts to end before it returns them to the store."""


class SecretsSettings(Section):
    """The host's secrets that environments may use. Any environment may name them, a downloaded one too."""

    variables: Names = []
    """The variables of the service that environments may name, such as `["GRADER_KEY"]`. Names are listed one by one,
    since a prefix would also allow variables that are set later."""
    folder: Path | None = None
    """The folder of the files that environments may name. Keep nothing else in it. Left out, they may name none."""


class SandboxesSettings(Section):
    """How many sandboxes are alive at once, and how many are started ahead."""

    ceiling: int | None = Field(None, ge=2)
    """The most sandboxes alive at once, warm ones included; one is reserved for graders. Left out, as many as the
    stages can hold."""
    pause_seconds: float = Field(60.0, ge=0)
    """How long the built-in agent waits for the engine before its sandbox is paused until its next use; 0 pauses none.
    Background programs stop meanwhile; `[sandbox] pause = false` of an environment lets them run."""
    save_seconds: float = Field(60.0, ge=0)
    """How long the built-in agent works before its sandbox is saved (again), so that a rollout that is interrupted runs
    no tool again that ran before; 0 saves none. It needs `[pipeline] resume`."""
    save_bytes: int = Field(64 * 1024**2, ge=1024**2)
    """The most bytes of files that one sandbox may have changed to be saved."""
    saved_bytes: int = Field(4 * 1024**3, ge=1024**2)
    """The most space for all saved sandboxes of this node, which are compressed."""
    max_memory_bytes: int = Field(16 * 1024**3, ge=1)
    """The most memory that an environment, or a downloaded task, may ask for; one that asks for more is refused."""
    max_disk_bytes: int = Field(64 * 1024**3, ge=1)
    """The same for what it writes."""
    max_processes: int = Field(8192, ge=1)
    """The same for its processes and threads."""
    save_folder: Path | None = None
    """A folder for saved sandboxes that all nodes share, under any path, so that a rollout of a lost node goes on from
    its sandbox on another one. Left out, they are in the state folder, for this node alone."""
    warm: WarmPoolConfig = WarmPoolConfig()
    pressure: PressureConfig = PressureConfig()


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
