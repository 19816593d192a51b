"""Sandboxes for episodes: from an environment's settings to a running sandbox, and files from one to the next.

From the end of the agent to the score, nothing that the agent wrote is executed or interpreted except as data, or in a
step of its own without grader, instance or result. Guarantees: when files are taken out of an agent's sandbox, no
process of the agent is left, and none of its programs has a part in it; what an agent did not make is simply not there
for the grader; what is more than the limit, or gone with a sandbox that the agent ended, is an empty submission and
never a failure.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from pathlib import PurePosixPath

import anyio

from rollout_service.environments.contract import EnvironmentSpec
from rollout_service.pipeline.artifacts import Artifacts, DiskBudget
from sandboxes import Bind, Sandbox, SandboxInfo, SandboxProvider, SandboxSpec, SessionName
from sandboxes.errors import FileMissingError, FileTooLargeError, LimitExceededError, SandboxClosedError

DEFAULT_BUDGET = 8 << 30
ENDED_NOTE = (
    "the agent's sandbox ended before it could be scored: nothing is left of what the agent did there"
)


class SandboxSource:
    """Starts sandboxes as environments want them."""

    def __init__(self, provider: SandboxProvider, artifacts_bytes: int = DEFAULT_BUDGET) -> None:
        """`artifacts_bytes` is what all artifacts together may take of the host's temporary disk."""
        self.provider = provider
        self._budget = DiskBudget(artifacts_bytes)

    @property
    def artifacts_bytes(self) -> int:
        """What all artifacts together may take."""
        return self._budget.size

    async def check(self, spec: EnvironmentSpec) -> None:
        """See that the image of an environment is there, where it and the provider need one.

        Raises ImageNotFoundError that says how to make it, or another SandboxError.
        """
        if spec.image is not None:
            await self.provider.identity(SandboxSpec(image=spec.image))

    async def start(
        self, spec: EnvironmentSpec, label: str, sessions: frozenset[SessionName] = frozenset()
    ) -> Sandbox:
        """Start a sandbox for an environment; `sessions` are those that will be used. Raises SandboxError."""
        if spec.image is None:
            raise ValueError(f"environment {spec.name} needs no sandbox")
        return await self.provider.start(
            SandboxSpec(
                image=spec.image,
                network=spec.sandbox.network,
                memory_bytes=spec.sandbox.memory_bytes,
                max_processes=spec.sandbox.max_processes,
                cpus=spec.sandbox.cpus,
                disk_bytes=spec.sandbox.disk_bytes,
                lifetime_seconds=spec.sandbox.lifetime,
                env=spec.sandbox.env,
                read_only_binds=[Bind(source, target) for target, source in spec.binds.items()],
                sessions=sessions,
                label=label,
            )
        )

    async def pack(self, sandbox: Sandbox, spec: EnvironmentSpec) -> Artifacts:
        """End the agent's processes and take its artifacts out of its sandbox; those that are not there are left out.

        Raises whatever keeps the host from reading them.
        """
        artifacts = Artifacts(self._budget, min(spec.artifacts_bytes, self._budget.size // 2))
        try:
            await self._pack(sandbox, spec, artifacts)
            await artifacts.settle()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await artifacts.close()
            raise
        return artifacts

    async def _pack(self, sandbox: Sandbox, spec: EnvironmentSpec, artifacts: Artifacts) -> None:
        if not spec.artifacts:
            return
        try:
            if not await self.end_agent(sandbox, artifacts.notes):
                return
            for path in spec.artifacts:
                with suppress(FileMissingError):
                    archive = sandbox.export_path(_inside(sandbox, path), limit=artifacts.left)
                    async with aclosing(archive):
                        await artifacts.add(path, archive)
        except FileTooLargeError as error:
            await artifacts.drop(f"the artifacts were left out, as if there were none: {error}")
        except SandboxClosedError:
            await artifacts.drop(ENDED_NOTE)

    async def end_agent(self, sandbox: Sandbox, notes: list[str]) -> bool:
        """End every process of the agent; False, and a note, where its sandbox has ended before."""
        try:
            await sandbox.end_processes()
        except (SandboxClosedError, LimitExceededError) as error:
            notes.append(f"{ENDED_NOTE} ({error})")
            return False
        return True

    async def unpack(self, sandbox: Sandbox, artifacts: Artifacts) -> None:
        """Put what was packed into another sandbox, at the same paths; may be done again."""
        async for parent, archive in artifacts.checked():
            await sandbox.import_path(_inside(sandbox, parent), archive)

    def live(self) -> list[SandboxInfo]:
        """The sandboxes that are alive."""
        return self.provider.live()


def _inside(sandbox: Sandbox, path: str) -> str:
    """A path of an environment as this sandbox has it; a provider without isolation moves the working folder."""
    pure, workdir = PurePosixPath(path), PurePosixPath(sandbox.spec.workdir)
    if pure == workdir.parent:
        return str(PurePosixPath(sandbox.workdir).parent)
    if pure.is_relative_to(workdir):
        return str(PurePosixPath(sandbox.workdir) / pure.relative_to(workdir))
    return path
