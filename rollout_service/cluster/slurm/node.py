"""The service on one node of a job: a task of Slurm.

It listens at the node's own address, on a port that the kernel chose; its address is in the job's folder while it
answers; its state is in the job's folder and outlasts the job; its scratch folder, on a local disk, is removed at its
end.
"""

from __future__ import annotations

import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import anyio
import structlog

from rollout_client.client import ClientError, RolloutClient
from rollout_service.base.errors import ConfigurationError
from rollout_service.cluster.slurm.children import EndRequests, KeptProcess
from rollout_service.cluster.slurm.folder import JobFolder, Published, joined_name, node_name, own_address
from rollout_service.cluster.slurm.redis_server import redis_address, wait_for_redis
from rollout_service.cluster.slurm.spec import END_SECONDS, JobSpec
from rollout_service.settings import PipelineSettings, load_settings

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.5
"""A shared file system announces no changes."""
DRAIN_MARGIN_SECONDS = 30.0
"""How much longer than `pipeline.drain_seconds` the service may take to end."""


@dataclass
class JobNode:
    folder: JobFolder
    spec: JobSpec
    scratch: Path
    name: str
    slot: int
    """Its number among the nodes of the job, which one of them has after a requeue, too."""
    home: JobFolder
    """The folder of the job whose Redis, shared folder and work this node has: its own, or the one that it joined."""
    home_spec: JobSpec
    ending: EndRequests

    async def run(self) -> int:
        """Serve until this task is to end; return the exit code."""
        address, was_stopped = own_address(), True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.ending.follow)
            tasks.start_soon(self._publish)
            try:
                while was_stopped and not self.ending.stopping.is_set():
                    was_stopped = await self._serve(address)
            finally:
                self.folder.withdraw("nodes", self.name)
            tasks.cancel_scope.cancel()
        return self.ending.exit_code if was_stopped else 1

    async def _serve(self, address: str) -> bool:
        """Serve until this node is to end or its Redis moves; return whether the service was stopped."""
        redis_url = None
        if self.spec.shares_a_redis:
            redis_url = await wait_for_redis(self.home, self.home_spec, self.ending.stopping)
        if self.ending.stopping.is_set():
            return True
        child = self._child(address, redis_url)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._end_child, child, redis_url)
            was_stopped = await child.keep_running() is None
            tasks.cancel_scope.cancel()
        return was_stopped

    async def _end_child(self, child: KeptProcess, redis_url: str | None) -> None:
        """End the service when this node is to end, or when the Redis that it shares has moved."""
        while not self.ending.stopping.is_set():
            with anyio.move_on_after(LOOK_SECONDS):
                await self.ending.stopping.wait()
            if redis_url is None:
                continue
            if redis_address(self.home, self.home_spec) not in (None, redis_url):
                log.info("the Redis has moved; the service starts again", node=self.name)
                break
        child.stopping.set()

    def _child(self, address: str, redis_url: str | None) -> KeptProcess:
        spec = self.spec
        command = [spec.python, "-m", "rollout_service.cli", "serve", "--host", address, "--port", "0"]
        command += ["--port-file", str(self._port_file), "--keys-file", str(self.folder.keys_file)]
        command += ["--state-dir", str(self.folder.state(self.slot if redis_url else None))]
        command += ["--config", str(spec.config)] if spec.config else []
        command += ["--engine", "none"] if spec.engines or spec.backends or spec.join else []
        for url in spec.backends:
            command += ["--backend", url]
        environment = {**os.environ, **self._settings(redis_url)}
        return KeptProcess(
            self.name,
            [*command, *spec.flags],
            self.folder.log(f"node-{self.name}"),
            DRAIN_MARGIN_SECONDS + spec.signal_seconds,
            environment,
        )

    def _settings(self, redis_url: str | None) -> dict[str, str]:
        drain = min(drain_seconds(self.spec, self.folder), self.spec.most_drain_seconds)
        settings = {"ROLLOUT_STORE__DISK": "network", "ROLLOUT_PIPELINE__DRAIN_SECONDS": f"{drain:g}"}
        if self.spec.images_dir is not None:
            settings["ROLLOUT_IMAGES_DIR"] = str(self.spec.images_dir)
        if redis_url is not None:
            home = self.home_spec
            settings["ROLLOUT_STORE__URL"] = redis_url
            settings["ROLLOUT_STORE__PREFIX"] = home.name
            settings["ROLLOUT_STORE__FOLDER"] = str(self.home.path / "shared")
            settings["ROLLOUT_SANDBOXES__SAVE_FOLDER"] = str(self.home.path / "saved-sandboxes")
            settings["ROLLOUT_CLUSTER__NAME"] = self.cluster_name
            if home.redis_url is None or home.redis_password_file is not None:
                password = home.redis_password_file or self.home.path / "redis/password"
                settings["ROLLOUT_STORE__PASSWORD_FILE"] = str(password)
        return settings

    @property
    def cluster_name(self) -> str:
        """The node's name among those that share the Redis; two jobs may have parts of one machine."""
        return joined_name(self.name, self.spec.name) if self.spec.join is not None else self.name

    @property
    def _port_file(self) -> Path:
        return self.scratch / "address"

    async def _publish(self) -> None:
        listed = ""
        while True:
            url = self._port_file.read_text().strip() if self._port_file.exists() else ""
            if url and url != listed and await _answers(url):
                job = os.environ.get("SLURM_JOB_ID", "")
                part = Published(name=self.name, url=url, job=job, node=node_name())
                listed = url if self.folder.publish("nodes", part) else ""
            await anyio.sleep(LOOK_SECONDS)


def drain_seconds(spec: JobSpec, folder: JobFolder) -> float:
    """Return `pipeline.drain_seconds` of the settings that a job's services read.

    Raises:
        ConfigurationError: The settings are not valid.
    """
    return load_settings(spec.config, keys_file=folder.keys_file).pipeline.drain_seconds


def check_drain(spec: JobSpec, folder: JobFolder) -> None:
    """
    Raises:
        ConfigurationError: The settings say to drain for longer than the job has from its signal to its end.
    """
    seconds = drain_seconds(spec, folder)
    if seconds > max(spec.most_drain_seconds, PipelineSettings().drain_seconds):
        raise ConfigurationError(
            f"pipeline.drain_seconds is {seconds:g}, and the job leaves {spec.most_drain_seconds:g} s for it",
            hint=f"Pass --drain {ceil(seconds + END_SECONDS)}, or lower the setting.",
        )


async def serve_on_node(folder: JobFolder, slot: int) -> int:
    """Serve on this node until this task is to end; return the exit code."""
    spec = folder.load().spec
    home = JobFolder(spec.join) if spec.join is not None else folder
    with _scratch(spec) as scratch:
        name = node_name()
        return await JobNode(
            folder, spec, scratch, name, slot, home, home.load().spec, EndRequests(f"node {name}")
        ).run()


@contextmanager
def _scratch(spec: JobSpec) -> Iterator[Path]:
    """Make a folder on this node's local disk, and remove it at the end."""
    parent = spec.scratch or Path(os.environ.get("TMPDIR", tempfile.gettempdir()))
    prefix = f"rollout-{getpass.getuser()}-{os.environ.get('SLURM_JOB_ID', 'job')}-{node_name()}-"
    for old in parent.glob(f"{prefix}*"):  # left by an earlier run of this job, which was killed
        shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _answers(url: str) -> bool:
    try:
        async with RolloutClient(url, patience_seconds=0) as client:
            with anyio.fail_after(10):
                await client.readiness()
    except (ClientError, TimeoutError):
        return False
    return True
