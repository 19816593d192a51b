"""This project's sandboxes as an environment of Harbor: `harbor run -e sandboxes.harbor:RolloutEnvironment`.

Guarantees:
- Each trial has its own Apptainer sandbox, which ends with `stop`, a failed or cancelled `start`, and at the latest
  Harbor's process.
- A task has no network unless it lists hosts, or the caller allows what "public" means.
- What comes back from a sandbox is written below the target only, whatever its archive says.

It needs Harbor and the package `sandboxes` in one Python environment; `scripts/install-harbor` makes one.
"""

from __future__ import annotations

import logging
import tarfile
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path, PurePosixPath
from typing import IO, Any

import anyio
import anyio.to_thread
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import (
    require_agent_environment_definition,
    should_use_prebuilt_docker_image,
)
from harbor.models.task.config import NetworkMode
from harbor.models.trial.paths import EnvironmentPaths

from sandboxes import Bind, FileMissingError, Network, Sandbox, SandboxError, SandboxSpec
from sandboxes.harbor_settings import HarborSandboxSettings, SharedProvider, shared_provider
from sandboxes.image_names import find_own_file
from sandboxes.images.build import ApptainerBuilder
from sandboxes.images.dockerfiles import build_many, dockerfile_at, find_or_pull
from sandboxes.images.sources import name_of_reference
from sandboxes.images.store import ImageStore
from sandboxes.limits.cgroups import find_control_groups

MAX_PROCESSES = 1024
NO_TIMEOUT_SECONDS = 7 * 86_400.0
"""For commands without a limit: Harbor's limits of the agent and the verifier end them."""
OUTPUT_LIMIT = 16 * 1024 * 1024
CHUNK_BYTES = 1 << 20
NAME_CHARS = 40
"""The part of an image's name that is the task's; the rest tells its contents."""
DIGEST_CHARS = 16
ROOT = (None, "root", "0", 0)
MIB = 1 << 20
AS_USER = 'exec setpriv --reuid="$0" --regid="$(id -g -- "$0")" --init-groups -- "$@"'
"""Runs its arguments as the user that is its name."""


class RolloutEnvironment(BaseEnvironment):  # type: ignore[misc, unused-ignore]
    """A trial's environment: one sandbox, whose image is the task's Dockerfile or `docker_image`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Besides Harbor's arguments, the fields of `HarborSandboxSettings` are further ones (`--ek NAME=VALUE`).

        Raises:
            SandboxConfigError: A value of these is not valid.
        """
        self._settings = HarborSandboxSettings.pop_from(kwargs)
        self._provider: SharedProvider | None = None
        self._sandbox: Sandbox | None = None
        super().__init__(*args, **kwargs)
        self.logger: logging.Logger

    @staticmethod
    def type() -> str:
        return "rollout"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(
            disable_internet=True,
            network_allowlist=True,
            network_allowlist_hostnames=True,
            network_allowlist_wildcard_hostnames=True,
            network_allowlist_ipv4_addresses=True,
            network_allowlist_ipv6_addresses=True,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        enforced = find_control_groups().enforced
        return EnvironmentResourceCapabilities(
            cpu_limit="cpus" in enforced, memory_limit="memory" in enforced, fractional_cpus=True
        )

    def _validate_definition(self) -> None:
        if (self.environment_dir / "docker-compose.yaml").exists():
            raise ValueError("there is one sandbox for a task, and no services beside it: Compose files cannot be used")
        require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)
        for mount in self._host_mounts:
            if mount["type"] != "bind" or not mount.get("read_only"):
                raise ValueError(
                    f"the mount at {mount['target']} is not a read-only bind, and a sandbox can have no other"
                )

    async def start(self, force_build: bool) -> None:
        image = await self._image(force_build=force_build)
        self._provider = shared_provider(self._settings)
        try:
            self._sandbox = await self._provider.start(self._spec(image))
            await self.ensure_dirs([*_folders(), *self._mount_targets(writable_only=True)])
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    async def stop(self, delete: bool) -> None:  # noqa: ARG002 - nothing of a sandbox outlives it
        """End the sandbox. Idempotent and shielded."""
        with anyio.CancelScope(shield=True):
            sandbox, self._sandbox = self._sandbox, None
            provider, self._provider = self._provider, None
            try:
                if sandbox is not None:
                    await sandbox.close()
            finally:
                if provider is not None:
                    await provider.release()

    async def _image(self, *, force_build: bool) -> Path:
        store = ImageStore(self._settings.images_dir, ApptainerBuilder(self._settings.layers_dir))
        named = self.task_env_config.docker_image
        if should_use_prebuilt_docker_image(self.environment_dir, docker_image=named, force_build=force_build):
            return await anyio.to_thread.run_sync(self._prebuilt, store, named)
        name = name_of_reference(f"harbor-{self.environment_name}")[:NAME_CHARS]
        digest = self.environment_id.rpartition(":")[2][:DIGEST_CHARS]
        source = dockerfile_at(self.environment_dir)
        (outcome,) = await build_many(
            store,
            {f"{name}-{digest}": source},
            given=self._settings.bases,
            force=force_build,
            progress=lambda _name, line: self.logger.debug(line),
        )
        if outcome.image is None:
            raise outcome.error or SandboxError(f"{source} was not built")
        return outcome.image.path.resolve()

    def _prebuilt(self, store: ImageStore, named: str) -> Path:
        """Return the task's own file of this name, or the image that `docker_image` means elsewhere."""
        local = find_own_file(self.environment_dir.parent, named)
        return local if local is not None else find_or_pull(store, named, self.logger.debug)

    def _spec(self, image: Path) -> SandboxSpec:
        table = self.task_env_config
        memory, disk = self._effective_memory_mb, self._effective_storage_mb
        return SandboxSpec(
            image=str(image),
            network=self._network(),
            memory_bytes=None if memory is None else memory * MIB,
            max_processes=MAX_PROCESSES,
            cpus=self._effective_cpus,
            disk_bytes=None if disk is None else disk * MIB,
            read_only_binds=[Bind(mount["source"], mount["target"]) for mount in self._host_mounts],
            workdir=table.workdir or "",
            label=self.session_id,
        )

    def _network(self) -> Network:
        policy = self.network_policy
        if policy.network_mode == NetworkMode.NO_NETWORK:
            return "none"
        if policy.network_mode == NetworkMode.ALLOWLIST:
            return tuple(policy.allowed_hosts)
        if self._settings.public_network == "none":
            self.logger.warning("the task may have a public network, and gets none; --ek public_network says otherwise")
        return self._settings.public_network

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        done = await self._started().exec(
            [*self._as_user(self._resolve_user(user)), "bash", "-c", command],
            cwd=cwd,
            env=self._merge_env(env),
            timeout=timeout_sec or NO_TIMEOUT_SECONDS,
            output_limit=OUTPUT_LIMIT,
        )
        if done.timed_out:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return ExecResult(
            stdout=done.stdout.decode(errors="replace"),
            stderr=done.stderr.decode(errors="replace"),
            return_code=done.exit_code,
        )

    def _as_user(self, user: str | int | None) -> Sequence[str]:
        """Another user is possible only if the sandbox has a root."""
        if user in ROOT:
            return ()
        if not self._settings.sandbox.fakeroot:
            self.logger.warning(f"a sandbox has one user, so {user!r} has no effect; see --ek sandbox and fakeroot")
            return ()
        return ("bash", "-c", AS_USER, str(user))

    def _started(self) -> Sandbox:
        if self._sandbox is None:
            raise RuntimeError("the environment has not been started, or has been stopped")
        return self._sandbox

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source, target = Path(source_path), PurePosixPath(target_path)
        await self._upload(source, str(target.parent), target.name)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._upload(Path(source_dir), target_dir, ".")

    async def _upload(self, source: Path, parent: str, name: str) -> None:
        with tempfile.TemporaryFile() as packed:
            await anyio.to_thread.run_sync(_pack, source, name, packed)
            await self._started().import_path(parent, _chunks(packed))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        target = anyio.Path(target_path)
        await target.parent.mkdir(parents=True, exist_ok=True)
        try:
            async with (
                aclosing(self._started().read_stream(source_path)) as parts,
                await target.open("wb") as file,
            ):
                async for part in parts:
                    await file.write(part)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await target.unlink(missing_ok=True)
            if isinstance(error, FileMissingError):
                raise FileNotFoundError(source_path) from error
            raise

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy the contents of a folder of the sandbox; links that lead out of it are left out.

        Raises:
            FileNotFoundError: There is no such folder.
        """
        with tempfile.TemporaryFile() as packed:
            try:
                async with aclosing(self._started().export_path(source_dir)) as parts:
                    async for part in parts:
                        await anyio.to_thread.run_sync(packed.write, part)
            except FileMissingError as error:
                raise FileNotFoundError(source_dir) from error
            await anyio.to_thread.run_sync(_unpack, packed, Path(target_dir))


def _folders() -> list[PurePosixPath]:
    paths = EnvironmentPaths()
    return [paths.agent_dir, paths.verifier_dir, paths.artifacts_dir, paths.tests_dir, paths.solution_dir]


def _pack(source: Path, name: str, file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.add(source, name)
    file.seek(0)


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    while chunk := await anyio.to_thread.run_sync(file.read, CHUNK_BYTES):
        yield chunk


def _unpack(file: IO[bytes], target: Path) -> None:
    """Unpack the contents of the one top-level folder of an archive that hostile code has filled."""
    file.seek(0)
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=file) as archive:
        for member in archive:
            _, _, below = member.name.partition("/")
            if not below:
                continue
            link = member.linkname.partition("/")[2] if member.islnk() else member.linkname
            moved = member.replace(name=below, linkname=link, deep=False)
            try:
                archive.extract(moved, target, filter="data")
            except tarfile.FilterError:
                continue
