"""Sandboxes for episodes: from an environment's settings to a running sandbox, and files from one to the next.

Guarantees: artifacts are streamed, never unpacked on the host, and held in files without a name, so that nothing
of them is left after a crash; what an agent did not make is simply not there for the grader.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import anyio
from anyio import SpooledTemporaryFile

from rollout_service.environments.contract import EnvironmentSpec
from sandboxes import Bind, Sandbox, SandboxInfo, SandboxProvider, SandboxSpec, SessionName
from sandboxes.errors import FileMissingError

IN_MEMORY_BYTES = 1 << 20
CHUNK_BYTES = 1 << 18


@dataclass(slots=True)
class Artifacts:
    """Archives of what an agent left, with the folder in which each is unpacked."""

    archives: list[tuple[str, SpooledTemporaryFile[bytes]]] = field(default_factory=list)

    async def close(self) -> None:
        """Free the files; idempotent."""
        while self.archives:
            _, file = self.archives.pop()
            await file.aclose()


class SandboxSource:
    """Starts sandboxes as environments want them."""

    def __init__(self, provider: SandboxProvider) -> None:
        self._provider = provider

    async def check(self, spec: EnvironmentSpec) -> None:
        """See that the image of an environment is there, where it and the provider need one.

        Raises ImageNotFoundError that says how to make it, or another SandboxError.
        """
        if spec.image is not None:
            await self._provider.identity(SandboxSpec(image=spec.image))

    async def start(
        self, spec: EnvironmentSpec, label: str, sessions: frozenset[SessionName] = frozenset()
    ) -> Sandbox:
        """Start a sandbox for an environment; `sessions` are those that will be used. Raises SandboxError."""
        if spec.image is None:
            raise ValueError(f"environment {spec.name} needs no sandbox")
        return await self._provider.start(
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

    async def pack(self, sandbox: Sandbox, paths: Sequence[str]) -> Artifacts:
        """Take paths out of a sandbox; those that are not there are left out."""
        artifacts = Artifacts()
        try:
            for path in paths:
                file = SpooledTemporaryFile[bytes](max_size=IN_MEMORY_BYTES)
                artifacts.archives.append((_parent(path), file))
                try:
                    async for chunk in sandbox.export_path(_inside(sandbox, path)):
                        await file.write(chunk)
                except FileMissingError:
                    artifacts.archives.pop()
                    await file.aclose()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await artifacts.close()
            raise
        return artifacts

    async def unpack(self, sandbox: Sandbox, artifacts: Artifacts) -> None:
        """Put what was packed into another sandbox, at the same paths; may be done again."""
        for parent, file in artifacts.archives:
            await file.seek(0)
            await sandbox.import_path(_inside(sandbox, parent), _chunks(file))

    def live(self) -> list[SandboxInfo]:
        """The sandboxes that are alive."""
        return self._provider.live()


def _inside(sandbox: Sandbox, path: str) -> str:
    """A path of an environment as this sandbox has it; a provider without isolation moves the working folder."""
    pure, workdir = PurePosixPath(path), PurePosixPath(sandbox.spec.workdir)
    if pure == workdir.parent:
        return str(PurePosixPath(sandbox.workdir).parent)
    if pure.is_relative_to(workdir):
        return str(PurePosixPath(sandbox.workdir) / pure.relative_to(workdir))
    return path


def _parent(path: str) -> str:
    return str(PurePosixPath(path).parent)


async def _chunks(file: SpooledTemporaryFile[bytes]) -> AsyncIterator[bytes]:
    while chunk := await file.read(CHUNK_BYTES):
        yield chunk
