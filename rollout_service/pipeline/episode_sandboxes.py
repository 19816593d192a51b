"""The sandboxes of one episode: the agent's, then the grader's, at most one at a time.

Guarantees: every sandbox that was started is closed by `release` at the latest; an admission ticket is taken before a
sandbox starts, and held until that sandbox has ended. A limit that a whole sandbox reached, such as that of its memory,
is a note of the result and a line of the log.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import structlog

from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import current_activity, in_lane, waits_for
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.episodes import Episode
from rollout_service.pipeline.artifacts import Artifacts
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.stage import Timer
from sandboxes import Sandbox, SessionName
from sandboxes.errors import LimitExceededError
from sandboxes.scheduling.admission import AdmissionController, Purpose, Ticket
from sandboxes.sessions.startup import open_sessions

log = structlog.get_logger(__name__)

_AGENT, _GRADER = "the agent", "the grader"
"""Whose code a sandbox runs, for notes."""


class EpisodeSandboxes:
    """Starts and ends the sandboxes of one episode, and carries the agent's artifacts from one to the next."""

    def __init__(
        self,
        source: SandboxSource,
        admission: AdmissionController,
        label: str,
        count_limit: Callable[[str], None],
    ) -> None:
        """Start nothing yet; `label` names the rollout to people who look at the host.

        `count_limit` is called for each limit that a grader's sandbox reached; agents' calls are counted apart.
        """
        self._count_limit = count_limit
        self._owner = _AGENT
        self._source = source
        self._admission = admission
        self._label = label
        self._ticket: Ticket | None = None
        self._artifacts: Artifacts | None = None
        self._episode: Episode | None = None
        """The episode whose sandbox is open."""

    async def admit(self, purpose: Purpose) -> None:
        """Wait until the host can bear one more sandbox."""
        self._ticket = await self._admission.admit(purpose)

    async def start(
        self,
        episode: Episode,
        spec: EnvironmentSpec,
        timer: Timer,
        sessions: frozenset[SessionName] = frozenset(),
        *,
        listens: bool = False,
    ) -> None:
        """Start the episode's sandbox, as `SandboxSource.start` does."""
        with timer.sandbox(), waits_for(StepKind.SANDBOX_START, spec.image or "") as step:
            self._episode, self._owner = episode, _AGENT
            episode.sandbox = await self._source.start(spec, self._label, sessions, listens=listens)
            step.note(sandbox=episode.sandbox.id)
            if (activity := current_activity()) is not None:
                activity.sandbox = episode.sandbox

    async def start_with_artifacts(
        self, episode: Episode, spec: EnvironmentSpec, timer: Timer, checkpoint: int | None = None
    ) -> None:
        """Start a fresh sandbox and copy the agent's artifacts into it, or those of a checkpoint."""
        await self.start(episode, spec.for_grader(), timer)
        self._owner = _GRADER
        if episode.sandbox is not None and self._artifacts is not None:
            with waits_for(StepKind.ARTIFACTS, "unpack", sandbox=episode.sandbox.id):
                await self._source.unpack(episode.sandbox, self._artifacts, checkpoint)

    @property
    def checkpoints(self) -> int:
        """The number of checkpoints."""
        return 0 if self._artifacts is None else len(self._artifacts.checkpoints)

    async def keep(self, episode: Episode, spec: EnvironmentSpec) -> None:
        """End the agent's processes and keep its artifacts as a checkpoint."""
        if episode.sandbox is not None:
            earlier, self._artifacts = self._artifacts, None
            with waits_for(StepKind.ARTIFACTS, "checkpoint", sandbox=episode.sandbox.id):
                self._artifacts = await self._source.keep(episode.sandbox, spec, earlier)

    async def open_sessions(self, episode: Episode, spec: EnvironmentSpec, timer: Timer) -> None:
        """Open the agent's sessions, which spares its first call the wait."""
        if episode.sandbox is not None:
            names = ", ".join(sorted(spec.sessions))
            with in_lane("sessions"), timer.sandbox(), waits_for(StepKind.SESSION, names):
                await open_sessions(episode.sandbox, spec.sessions)

    async def pack(self, episode: Episode, spec: EnvironmentSpec) -> None:
        """End the agent's processes and keep its artifacts for the grader's sandbox."""
        if episode.sandbox is not None:
            earlier, self._artifacts = self._artifacts, None
            with waits_for(StepKind.ARTIFACTS, "pack", sandbox=episode.sandbox.id):
                self._artifacts = await self._source.pack(episode.sandbox, spec, earlier)
            episode.notes += self._artifacts.notes
            episode.ended += self._artifacts.ended

    async def end_agent(self, episode: Episode, spec: EnvironmentSpec) -> bool:
        """End the agent's processes unless they are kept; return False if its sandbox has ended already."""
        if episode.sandbox is None:
            return True
        with waits_for(StepKind.ARTIFACTS, "end the agent", sandbox=episode.sandbox.id):
            return await self._source.end_agent(episode, spec)

    async def close(self, *, keep_ticket: bool = False) -> None:
        """Close the sandbox; the next one can take its place if the ticket is kept. Idempotent."""
        if self._episode is not None and self._episode.sandbox is not None:
            sandbox, self._episode.sandbox = self._episode.sandbox, None
            for reached in sandbox.limits_reached:
                self._tell(self._episode, sandbox, reached)
            with waits_for(StepKind.SANDBOX_END, sandbox=sandbox.id):
                await sandbox.close()
            if (activity := current_activity()) is not None:
                activity.sandbox = None
        if not keep_ticket and self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.release()

    def _tell(self, episode: Episode, sandbox: Sandbox, reached: LimitExceededError) -> None:
        episode.notes.append(f"{self._owner}: {reached}")
        if self._owner == _GRADER:
            self._count_limit(reached.limit)
        log.warning(
            "a sandbox reached a limit",
            rollout_id=self._label,
            sandbox=sandbox.id,
            of=self._owner,
            limit=reached.limit,
            why=str(reached),
        )

    async def release(self) -> None:
        """Close the sandbox and delete the artifacts; shielded and idempotent."""
        with anyio.CancelScope(shield=True):
            await self.close()
            if self._artifacts is not None:
                await self._artifacts.close()
