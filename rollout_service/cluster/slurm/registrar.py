"""Keeps the engines that a service uses the same as those that its job runs.

Guarantee: an engine of this job that ended or moved is removed, and no engine is removed that this job did not add.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import anyio
import structlog

from api_schemas.inference import BackendSpec
from rollout_client.client import ClientError, RolloutClient
from rollout_service.base.private_files import write_private
from rollout_service.cluster.slurm.folder import JobFolder

log = structlog.get_logger(__name__)

LOOK_SECONDS = 1.0


@dataclass
class Registrar:
    """Registers the engines in a job's folder with the job's service."""

    folder: JobFolder
    ours: set[str] = field(default_factory=set)
    """URLs that this job has added, in this run or an earlier one."""

    async def run(self) -> None:
        """Follow the folder until cancelled."""
        file = self.folder.path / "engines.registered"
        self.ours = set(json.loads(file.read_text())) if file.exists() else set()
        while True:
            before = set(self.ours)
            for node in self.folder.published("nodes"):
                try:
                    await self._register(node.url)
                    break
                except ClientError as error:
                    log.debug("engines are not registered yet", node=node.name, reason=str(error))
            if before != self.ours:
                write_private(file, json.dumps(sorted(self.ours)).encode())
            await anyio.sleep(LOOK_SECONDS)

    async def _register(self, url: str) -> None:
        """Make a service's list of engines follow the folder's.

        Raises:
            ClientError: The service does not answer, or refuses an engine.
        """
        wanted = {engine.url for engine in self.folder.published("engines")}
        async with RolloutClient(url, self.folder.key, patience_seconds=0) as client:
            there = {backend.url.rstrip("/"): backend.backend_id for backend in await client.backends()}
            for engine in sorted(wanted - set(there)):
                await client.add_backend(BackendSpec.model_validate({"url": engine}))
                log.info("engine added", url=engine)
            for engine in sorted((self.ours & set(there)) - wanted):
                await client.remove_backend(there[engine])
                log.info("engine removed", url=engine)
            self.ours = (self.ours & set(there)) | wanted
