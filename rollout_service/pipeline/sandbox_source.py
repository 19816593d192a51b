"""Sandboxes for episodes: from an environment's settings to a running sandbox, and files from one to the next.

Between the end of the agent and the score, nothing that the agent wrote is executed or interpreted except as data, or
in a separate step without grader, instance or result.

Guarantees:
- When files are taken out of an agent's sandbox, no process of the agent is left, and none of its programs takes part.
- An artifact that the agent did not make is missing for the grader.
- Artifacts above the limit, or lost with a sandbox that the agent ended, are an empty submission, never a failure.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path, PurePosixPath

import anyio
import structlog

from api_schemas.rollouts.steps import StepKind
from rollout_service.activity import current_activity, in_lane, waits_for
from rollout_service.environments.agent_environment import WORKDIR
from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.environments.secrets import HostSecrets
from rollout_service.episodes import Episode, WorkClock, require_sandbox
from rollout_service.pipeline.artifacts import Artifacts, DiskBudget
from rollout_service.pipeline.stage import Timer
from rollout_service.settings.pipeline import SandboxesSettings
from sandboxes import Bind, Sandbox, SandboxInfo, SandboxProvider, SandboxSpec, SessionName, Snapshot
from sandboxes.errors import (
    FileMissingError,
    FileTooLargeError,
    LimitExceededError,
    SandboxClosedError,
    SandboxConfigError,
)
from sandboxes.scheduling.admission import AdmissionController, Purpose, Ticket
from sandboxes.sessions.serial_session import open_sessions

DEFAULT_BUDGET = 8 << 30
RESPONSE_SECONDS = 30.0
"""For a sandbox whose processes go on; as long as the host waits for their end."""
ENDED_NOTE = "the agent's sandbox ended before it could be scored: none of the agent's work is left"


class SandboxSource:
    def __init__(
        self,
        provider: SandboxProvider,
        artifacts_bytes: int = DEFAULT_BUDGET,
        secrets: HostSecrets | None = None,
        settings: SandboxesSettings | None = None,
    ) -> None:
        """`artifacts_bytes` is the budget of all artifacts together on the host's temporary disk; `secrets` are by
        default none.
        """
        self.provider = provider
        self._settings = settings or SandboxesSettings()
        self.secrets = secrets or HostSecrets()
        self._budget = DiskBudget(artifacts_bytes)

    @property
    def artifacts_bytes(self) -> int:
        return self._budget.size

    async def check(self, spec: EnvironmentSpec) -> None:
        """Check that the environment's sandboxes may be as large as it asks, and that their images exist.

        Raises:
            SandboxConfigError: It asks for more than the settings allow.
            ImageError: An image cannot be used.
        """
        check_sizes(spec, self._settings)
        for image in dict.fromkeys((spec.image, spec.for_grader().image)):
            if image is not None:
                await self.provider.identity(SandboxSpec(image=image))

    async def snapshot_identity(self, spec: EnvironmentSpec) -> str | None:
        """Return None unless the environment's sandboxes can become snapshots."""
        wanted = SandboxSpec(image=spec.image)
        if spec.image is None or not await self.provider.takes_snapshots(wanted):
            return None
        return await self.provider.identity(wanted)

    async def start(
        self,
        spec: EnvironmentSpec,
        label: str,
        sessions: frozenset[SessionName] = frozenset(),
        *,
        listens: bool = False,
        snapshot: Snapshot | None = None,
        saved: Path | None = None,
    ) -> Sandbox:
        """Start a sandbox from an image, a snapshot of another sandbox, or a saved one; `sessions` will be used.

        With `listens`, programs inside can connect to this service.

        Raises:
            SandboxError: The sandbox does not start.
            SecretMissingError: A secret of the sandbox cannot be read.
        """
        if spec.image is None:
            raise ValueError(f"environment {spec.name} has no image to start a sandbox from")
        check_sizes(spec, self._settings)
        return await self.provider.start(
            SandboxSpec(
                image=spec.image,
                snapshot=snapshot,
                saved=saved,
                network=spec.sandbox.network,
                memory_bytes=spec.sandbox.memory_bytes,
                max_processes=spec.sandbox.max_processes,
                cpus=spec.sandbox.cpus,
                disk_bytes=spec.sandbox.disk_bytes,
                lifetime_seconds=spec.sandbox.lifetime,
                env=spec.sandbox.env | self.secrets.for_sandbox(spec),
                read_only_binds=[Bind(source, target) for target, source in spec.binds.items()],
                workdir=spec.workdir,
                sessions=sessions,
                listens=listens,
                label=label,
            )
        )

    async def pack(
        self,
        sandbox: Sandbox,
        spec: EnvironmentSpec,
        clock: WorkClock,
        earlier: Artifacts | None = None,
        *,
        is_checkpoint: bool = False,
    ) -> Artifacts:
        """End the agent's processes and take out its artifacts; skip those that do not exist.

        The clock stands still while they wait for room. `earlier` has the checkpoints before, if any.
        """
        artifacts = earlier or Artifacts(self._budget, min(spec.artifacts_bytes, self._budget.size // 2), clock)
        try:
            await self._pack(sandbox, spec, artifacts)
            if is_checkpoint:
                artifacts.keep()
            else:
                await artifacts.settle()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await artifacts.close()
            raise
        return artifacts

    async def _pack(self, sandbox: Sandbox, spec: EnvironmentSpec, artifacts: Artifacts) -> None:
        if not spec.artifacts:
            return
        artifacts.paths = _outermost([sandbox.spec.workdir if one == WORKDIR else one for one in spec.artifacts])
        try:
            if not await _end(sandbox, artifacts.notes, artifacts.ended):
                return
            for path in artifacts.paths:
                with suppress(FileMissingError):
                    archive = sandbox.export_path(_inside(sandbox, path), limit=artifacts.left)
                    async with aclosing(archive):
                        await artifacts.add(path, archive)
        except FileTooLargeError as error:
            await artifacts.drop(f"the artifacts were left out, and the submission counts as empty: {error}")
        except SandboxClosedError:
            await artifacts.drop(ENDED_NOTE)

    async def end_agent(self, episode: Episode, spec: EnvironmentSpec) -> bool:
        """Before grading in the agent's sandbox, end every process of the agent, unless the environment keeps them.

        Return False and add a note if the sandbox has ended already.
        """
        if (sandbox := episode.sandbox) is None:
            return True
        if spec.agent_processes == "end":
            return await _end(sandbox, episode.notes, episode.ended)
        if alive := await sandbox.responds(RESPONSE_SECONDS):
            return alive
        episode.notes.append(ENDED_NOTE)
        return False

    async def unpack(self, sandbox: Sandbox, artifacts: Artifacts, checkpoint: int | None = None) -> None:
        """Replace another sandbox's artifacts by the packed ones, or those of a checkpoint; may be repeated."""
        if artifacts.paths and sandbox.workdir == sandbox.spec.workdir:
            # What the image has there would come back although the agent has removed it, or be in the way.
            paths = shlex.join(artifacts.paths)
            command = f"rm -rf -- {paths}; mkdir -p -- {shlex.quote(sandbox.workdir)}"
            await sandbox.exec(["bash", "-c", command], cwd="/")
        async for parent, archive in artifacts.checked(checkpoint):
            await sandbox.import_path(_inside(sandbox, parent), archive)

    def live(self) -> list[SandboxInfo]:
        return self.provider.live()


def check_sizes(spec: EnvironmentSpec, allowed: SandboxesSettings) -> None:
    """
    Raises:
        SandboxConfigError: A sandbox of the environment asks for more than the settings allow.
    """
    for wanted in filter(None, (spec.sandbox, spec.grader_sandbox)):
        for key, asked, most in (
            ("memory_bytes", wanted.memory_bytes, allowed.max_memory_bytes),
            ("disk_bytes", wanted.disk_bytes or 0, allowed.max_disk_bytes),
            ("processes", wanted.max_processes, allowed.max_processes),
        ):
            if asked > most:
                what = key.removesuffix("_bytes")
                raise SandboxConfigError(
                    f"it asks for {what} of {asked:,}, and this service allows {most:,}",
                    hint=f"Raise `[sandboxes] max_{key}` if the host bears it, or ask for less.",
                )


async def _end(sandbox: Sandbox, notes: list[str], ended: list[str]) -> bool:
    """Add command lines to `ended`, or a note if the sandbox has ended before."""
    try:
        running = await sandbox.list_running()
        await sandbox.end_processes()
    except (SandboxClosedError, LimitExceededError) as error:
        notes.append(f"{ENDED_NOTE} ({error})")
        return False
    ended += running  # a sandbox that is ending by itself may list processes of its own
    return True


def _outermost(paths: list[str]) -> list[str]:
    """Leave out paths below another, and repeated ones."""
    pure = dict.fromkeys(PurePosixPath(path) for path in paths)
    return [str(path) for path in pure if not any(parent in pure for parent in path.parents)]


def _inside(sandbox: Sandbox, path: str) -> str:
    """Translate an environment's path to this sandbox's: a provider without isolation moves the working folder."""
    pure, workdir = PurePosixPath(path), PurePosixPath(sandbox.spec.workdir)
    if pure == workdir.parent:
        return str(PurePosixPath(sandbox.workdir).parent)
    if pure.is_relative_to(workdir):
        return str(PurePosixPath(sandbox.workdir) / pure.relative_to(workdir))
    return path


log = structlog.get_logger(__name__)

_AGENT, _GRADER, _SETUP = "the agent", "the grader", "the setup"
"""Owners of a sandbox's code, for notes."""


class EpisodeSandboxes:
    """The sandboxes of one episode: the agent's, then the grader's, at most one at a time.

    Every sandbox is closed by `release` at the latest; an admission ticket is taken before a sandbox starts, and held
    until it has ended. A limit that a whole sandbox reached, such as that of its memory, is a note of the result and a
    line of the log.
    """

    def __init__(
        self,
        source: SandboxSource,
        admission: AdmissionController,
        label: str,
        count_limit: Callable[[str], None],
    ) -> None:
        """`label` names the rollout to people who look at the host.

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

    async def admit(self, purpose: Purpose) -> None:
        self._ticket = await self._admission.admit(purpose)

    async def start(
        self,
        episode: Episode,
        spec: EnvironmentSpec,
        timer: Timer,
        sessions: frozenset[SessionName] = frozenset(),
        *,
        listens: bool = False,
        snapshot: Snapshot | None = None,
        saved: Path | None = None,
    ) -> None:
        with timer.sandbox(), waits_for(StepKind.SANDBOX_START, spec.image or "") as step:
            self._episode, self._owner = episode, _AGENT
            episode.sandbox = await self._source.start(
                spec, self._label, sessions, listens=listens, snapshot=snapshot, saved=saved
            )
            step.note(sandbox=episode.sandbox.id)
            if (activity := current_activity()) is not None:
                activity.sandbox = episode.sandbox

    async def start_with_artifacts(
        self, episode: Episode, spec: EnvironmentSpec, timer: Timer, checkpoint: int | None = None
    ) -> None:
        """Start a sandbox with the agent's artifacts, or those of a checkpoint."""
        await self.start(episode, spec.for_grader(), timer)
        self._owner = _GRADER
        if episode.sandbox is not None and self._artifacts is not None:
            with waits_for(StepKind.ARTIFACTS, "unpack", sandbox=episode.sandbox.id):
                await self._source.unpack(episode.sandbox, self._artifacts, checkpoint)

    @property
    def checkpoints(self) -> int:
        return 0 if self._artifacts is None else len(self._artifacts.checkpoints)

    async def snapshot(self, episode: Episode) -> Snapshot:
        """End the sandbox, and return its files for others to start from."""
        sandbox, self._owner = require_sandbox(episode.sandbox), _SETUP
        self._tell_limits(episode, sandbox)
        with waits_for(StepKind.SANDBOX_END, "snapshot", sandbox=sandbox.id):
            snapshot = await sandbox.snapshot()
        episode.sandbox = None
        if (activity := current_activity()) is not None:
            activity.sandbox = None
        return snapshot

    async def open_sessions(self, episode: Episode, spec: EnvironmentSpec, timer: Timer) -> None:
        if episode.sandbox is not None:
            names = ", ".join(sorted(spec.sessions))
            with in_lane("sessions"), timer.sandbox(), waits_for(StepKind.SESSION, names):
                await open_sessions(episode.sandbox, spec.sessions)

    async def pack(self, episode: Episode, spec: EnvironmentSpec, *, is_checkpoint: bool = False) -> None:
        """End the agent's processes, and keep its artifacts for the grader, at the end or as a checkpoint."""
        if (sandbox := episode.sandbox) is None:
            return
        earlier, self._artifacts = self._artifacts, None
        with waits_for(StepKind.ARTIFACTS, "checkpoint" if is_checkpoint else "pack", sandbox=sandbox.id):
            packed = await self._source.pack(sandbox, spec, episode.clock, earlier, is_checkpoint=is_checkpoint)
        self._artifacts = packed
        if not is_checkpoint:
            episode.notes += packed.notes
            episode.ended += packed.ended

    async def end_agent(self, episode: Episode, spec: EnvironmentSpec) -> bool:
        """Return False if the agent's sandbox has ended already."""
        if episode.sandbox is None:
            return True
        with waits_for(StepKind.ARTIFACTS, "end the agent", sandbox=episode.sandbox.id):
            return await self._source.end_agent(episode, spec)

    async def close(self, *, keep_ticket: bool = False) -> None:
        """Let the next sandbox take the place if the ticket is kept. Idempotent."""
        if self._episode is not None and self._episode.sandbox is not None:
            sandbox, self._episode.sandbox = self._episode.sandbox, None
            self._tell_limits(self._episode, sandbox)
            with waits_for(StepKind.SANDBOX_END, sandbox=sandbox.id):
                await sandbox.close()
            if (activity := current_activity()) is not None:
                activity.sandbox = None
        if not keep_ticket and self._ticket is not None:
            ticket, self._ticket = self._ticket, None
            ticket.release()

    def _tell_limits(self, episode: Episode, sandbox: Sandbox) -> None:
        for reached in sandbox.limits_reached:
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
        with anyio.CancelScope(shield=True):
            await self.close()
            if self._artifacts is not None:
                await self._artifacts.close()
