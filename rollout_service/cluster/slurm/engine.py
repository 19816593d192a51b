"""An engine of a job: a task of Slurm that starts it, waits for it, watches it, and replaces it when it dies.

The engine is listed in the job's folder only while it has answered; one that hangs is killed and started again, at the
same address if that is still free. Why it does not start is in the folder too; after `MAX_FAILED_STARTS` in a row, its
task ends, so that the job does not hold GPUs that nobody can use.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import structlog

from rollout_service.base.errors import ConfigurationError
from rollout_service.cluster.slurm.children import ENGINE_GIVEN_UP, EndRequests, KeptProcess, pause_after
from rollout_service.cluster.slurm.folder import JobFolder, Published, StartFailure, last_lines, node_name, own_address
from rollout_service.cluster.slurm.spec import Engines
from sandboxes.host.ports import free_port

log = structlog.get_logger(__name__)

GRACE_SECONDS = 20.0
LOOK_SECONDS = 1.0
PROBE_SECONDS = 10.0
FAILED_PROBES = 6
"""Unanswered probes in a row after which an engine is replaced; long prefills delay answers."""
MAX_FAILED_STARTS = 20
"""The pauses between them take eight minutes or more."""
MAX_REASON_CHARS = 500
LAST_LINES = 50
"""How many lines of a log are searched for the last one that says something."""


@dataclass
class JobEngine:
    folder: JobFolder
    engines: Engines
    name: str
    slot: int

    async def run(self) -> int:
        """Serve until this task is to end; return the exit code."""
        ending = EndRequests(f"engine {self.name}")
        stopping = ending.stopping
        address, port, failed = own_address(), 0, 0
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ending.follow)
            while not stopping.is_set():
                port = port or free_port(address)
                answered, exit_code = await self._serve_once(address, port, stopping)
                failed = 0 if answered else failed + 1
                if failed and not stopping.is_set():
                    self._note_failure(failed, exit_code)
                    port = 0
                if failed == MAX_FAILED_STARTS:
                    ending.exit_code = ENGINE_GIVEN_UP
                    break
                with anyio.move_on_after(pause_after(failed)):
                    await stopping.wait()
            tasks.cancel_scope.cancel()
        return ending.exit_code

    async def _serve_once(self, address: str, port: int, stopping: anyio.Event) -> tuple[bool, int | None]:
        """Run the engine until it ends or hangs; return whether it ever answered, and its exit code if it ended."""
        # Braces of JSON in the command stay as they are.
        command = self.engines.command.replace("{host}", address).replace("{port}", str(port))
        child = KeptProcess(
            self.name, shlex.split(command), self._log, GRACE_SECONDS, self._environment(), stopping=stopping
        )
        seen, code = anyio.Event(), None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._watch, f"http://{address}:{port}", seen, tasks.cancel_scope)
                code = await self._run_once(child)
                log.warning("engine ended", engine=self.name, exit_code=code)
                tasks.cancel_scope.cancel()
        finally:
            self.folder.withdraw("engines", self.name)
        return seen.is_set(), code

    async def _run_once(self, child: KeptProcess) -> int | None:
        try:
            return await child.run_once()
        except OSError as error:
            with self._log.open("a") as output:
                output.write(f"{child.command[0]} cannot be started: {error.strerror}\n")
            return None

    @property
    def _log(self) -> Path:
        return self.folder.log(f"engine-{self.name}")

    def _note_failure(self, starts: int, exit_code: int | None) -> None:
        lines = last_lines(self._log, LAST_LINES)
        reason = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
        self.folder.fail(
            StartFailure(name=self.name, starts=starts, exit_code=exit_code, reason=reason[:MAX_REASON_CHARS])
        )

    def _environment(self) -> dict[str, str]:
        """Give the engine its share of the node's GPUs."""
        devices = [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
        share = len(devices) // self.engines.per_node
        own = devices[self.slot * share : (self.slot + 1) * share]
        return {**os.environ, **({"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {})}

    async def _watch(self, url: str, seen: anyio.Event, scope: anyio.CancelScope) -> None:
        """List the engine once it answers; cancel the scope, which ends it, when it has stopped answering."""
        async with httpx.AsyncClient(timeout=PROBE_SECONDS, trust_env=False) as client:
            with anyio.move_on_after(self.engines.start_seconds):
                while not await _is_healthy(client, url):  # noqa: ASYNC110 - an engine announces nothing
                    await anyio.sleep(LOOK_SECONDS)
                job = os.environ.get("SLURM_JOB_ID", "")
                part = Published(name=self.name, url=url, job=job, node=node_name())
                while not self.folder.publish("engines", part):  # noqa: ASYNC110 - a file system announces nothing
                    await anyio.sleep(LOOK_SECONDS)
                self.folder.withdraw("failures", self.name)
                seen.set()
            failed = 0 if seen.is_set() else FAILED_PROBES
            while failed < FAILED_PROBES:
                await anyio.sleep(PROBE_SECONDS)
                failed = 0 if await _is_healthy(client, url) else failed + 1
        log.warning("engine does not answer; it is replaced", engine=self.name)
        scope.cancel()


async def serve_engine(folder: JobFolder) -> int:
    """Serve one engine in this task until it is to end; return the exit code.

    Raises:
        ConfigurationError: The job has no engines.
    """
    engines = folder.load().spec.engines
    if engines is None:
        raise ConfigurationError(f"the job of {folder.path} has no engines", hint="Submit it with --engine-command.")
    slot = int(os.environ.get("SLURM_LOCALID", "0"))
    return await JobEngine(folder, engines, f"{node_name()}-{slot}", slot).run()


async def _is_healthy(client: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await client.get(f"{url}/health")).is_success
    except httpx.HTTPError:
        return False
