"""The batch step of a job: it starts Redis, engines and the service, watches them, and ends them in order.

Parts that die are started again, and a node that is lost leaves the others at work. SIGUSR1, which Slurm sends before a
limit of time or a preemption, and parts that Slurm ends by itself, drain the service and put the job back into the
queue, from which it resumes. SIGUSR2 and SIGTERM drain it for good. Engines end after the services that use them, and
Redis after everything that writes to it. A trainer's end is the job's end, with its exit code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
import structlog

from api_schemas.inference import BackendSpec
from rollout_client.client import ClientError, RolloutClient
from rollout_service.base.errors import ConfigurationError
from rollout_service.base.private_files import write_private
from rollout_service.cluster.slurm import commands
from rollout_service.cluster.slurm.children import ENDED_BY_SLURM, ENGINE_GIVEN_UP, KeptProcess
from rollout_service.cluster.slurm.folder import JobFolder, Submitted, node_name
from rollout_service.cluster.slurm.redis_server import redis_child, wait_for_files
from rollout_service.cluster.slurm.spec import JobSpec

log = structlog.get_logger(__name__)

REGISTER_SECONDS = 1.0


@dataclass
class Registrar:
    """Registers the engines in a job's folder with the job's service.

    An engine of this job that ended or moved is removed, and no engine is removed that this job did not add.
    """

    folder: JobFolder
    ours: set[str] = field(default_factory=set)
    """URLs that this job has added, in this run or an earlier one."""

    async def run(self) -> None:
        file = self.folder.path / "engines.registered"
        self.ours = set(json.loads(file.read_text())) if file.exists() else set()
        saved = set(self.ours)
        while True:
            try:
                await self._register_at_one()
                if saved != self.ours:
                    write_private(file, json.dumps(sorted(self.ours)).encode())
                    saved = set(self.ours)
            except OSError as error:
                log.warning("the job's folder cannot be read or written; it is tried again", error=str(error))
            await anyio.sleep(REGISTER_SECONDS)

    async def _register_at_one(self) -> None:
        for node in self.folder.published("nodes"):
            try:
                await self._register(node.url)
            except ClientError as error:
                log.debug("engines are not registered yet", node=node.name, reason=str(error))
            else:
                return

    async def _register(self, url: str) -> None:
        wanted = {engine.url for engine in self.folder.published("engines")}
        async with RolloutClient(url, self.folder.key, patience_seconds=0) as client:
            there = {backend.url.rstrip("/"): backend.backend_id for backend in await client.backends()}
            for engine in sorted(wanted - set(there)):
                await self._add(client, engine)
            for engine in sorted((self.ours & set(there)) - wanted):
                await client.remove_backend(there[engine])
                log.info("engine removed", url=engine)
            self.ours = (self.ours & set(there)) | wanted

    async def _add(self, client: RolloutClient, engine: str) -> None:
        """Add an engine; one that is refused, as after the loss of its node, keeps no other from being added."""
        try:
            await client.add_backend(BackendSpec.model_validate({"url": engine}))
        except ClientError as error:
            log.debug("an engine is not registered yet", url=engine, reason=str(error))
        else:
            log.info("engine added", url=engine)


ENGINES, NODE = "engines", "node-"
LOOK_SECONDS = 0.5
FAILURES_SECONDS = 2.0
TRAINER_SECONDS = 30.0
"""How long a trainer may take after SIGTERM before it is killed: the job goes back into the queue only afterward."""
REQUEUE_SECONDS = 60.0
"""How long Slurm may take to end a job that it has put back into the queue."""
REQUEUE_TRIES = 12
"""A controller that starts again is away for up to a minute."""
ASK_AGAIN_SECONDS = 5.0
DRAIN_MARGIN_SECONDS = 30.0


@dataclass
class Supervisor:
    folder: JobFolder
    spec: JobSpec
    stopping: anyio.Event = field(default_factory=anyio.Event)
    requeue: bool = False
    """The job goes back into the queue after its drain."""
    exit_code: int = 0

    async def run(self) -> int:
        """Run the job to its end; return the exit code.

        Raises:
            ServiceError: A part cannot be started.
        """
        await self._build_images()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_signals)
            async with self._redis():
                nodes = await commands.host_names(os.environ["SLURM_JOB_NODELIST"])
                await self._run_parts(self._services(nodes), self._engines(nodes))
            tasks.cancel_scope.cancel()
        if self.requeue:
            await self._requeue()
        return self.exit_code

    @asynccontextmanager
    async def _redis(self) -> AsyncIterator[None]:
        claim = await wait_for_files(self.folder, self.stopping) if self.spec.starts_a_redis else None
        if claim is None:
            yield
            return
        try:
            async with self._running([redis_child(self.folder, self.spec)]):
                yield
        finally:
            claim.release()

    async def _run_parts(self, services: list[KeptProcess], engines: list[KeptProcess]) -> None:
        """Run everything but Redis until the job is to stop, and end it in order."""
        async with anyio.create_task_group() as helpers:
            if self.spec.engines is not None:
                helpers.start_soon(Registrar(self.folder).run)
                helpers.start_soon(self._log_failures)
            if self.spec.trainer:
                helpers.start_soon(self._train)
            async with self._running(engines), self._running(services):
                await self.stopping.wait()
            helpers.cancel_scope.cancel()

    @asynccontextmanager
    async def _running(self, steps: list[KeptProcess]) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            for step in steps:
                tasks.start_soon(self._keep_running, step)
            yield
            for step in steps:
                step.stopping.set()

    async def _keep_running(self, step: KeptProcess) -> None:
        code = await step.keep_running()
        if code == 0 and step.name != ENGINES:
            log.warning("a node is lost; the others go on", part=step.name)
            self.folder.withdraw("nodes", step.name.removeprefix(NODE))
        elif code == ENGINE_GIVEN_UP:
            log.error("no engine can be started; the job ends", logs=str(self.folder.log("engine-*")))
            self.exit_code = 1
            self._stop(requeue=False)
        elif code is not None:
            log.warning("slurm ended a part of the job, which goes back into the queue", part=step.name)
            self._stop(requeue=True)

    async def _log_failures(self) -> None:
        known: set[tuple[str, int]] = set()
        while True:
            with suppress(OSError):  # the registrar says so
                failures = {(failure.name, failure.starts): failure for failure in self.folder.failures()}
                for key in failures.keys() - known:
                    log.warning("engine does not start", **failures[key].model_dump())
                known = set(failures)
            await anyio.sleep(FAILURES_SECONDS)

    def _services(self, nodes: list[str]) -> list[KeptProcess]:
        group = ["--het-group=0"] if "SLURM_HET_SIZE" in os.environ else []
        return [
            self._step(
                NODE + name,
                [*group, "--nodes=1", "--ntasks=1", f"--nodelist={name}"],
                "node",
                f"--slot={slot}",
            )
            for slot, name in enumerate(nodes)
        ]

    def _engines(self, nodes: list[str]) -> list[KeptProcess]:
        if (engines := self.spec.engines) is None:
            return []
        count = engines.resources.nodes if engines.resources is not None else 1
        where = ["--het-group=1"] if engines.resources is not None else [f"--nodelist={nodes[0]}"]
        size = [f"--nodes={count}", f"--ntasks={count * engines.per_node}", "--kill-on-bad-exit=0"]
        return [self._step(ENGINES, [*where, *size], "engine")]

    def _step(self, name: str, where: list[str], role: str, *flags: str) -> KeptProcess:
        task = [self.spec.python, "-m", "rollout_service.cli", "slurm", role, str(self.folder.path), *flags]
        # The steps share the node's processors and memory: none of them waits for another to end.
        srun = ["srun", "--overlap", "--mem=0", "--no-kill", *where, "--", *task]
        grace = self.spec.signal_seconds + DRAIN_MARGIN_SECONDS
        output = self.folder.log(name.partition("-")[0] + "-steps")
        final = frozenset({0, ENDED_BY_SLURM, ENGINE_GIVEN_UP})
        return KeptProcess(name, srun, output, grace, ends_with_input=True, final_codes=final)

    async def _build_images(self) -> None:
        """Build the images once, on this node, before any service starts."""
        environment = dict(os.environ)
        if self.spec.images_dir is not None:
            environment["ROLLOUT_IMAGES_DIR"] = str(self.spec.images_dir)
        for name in self.spec.images:
            command = [self.spec.python, "-m", "rollout_service.cli", "image", "build", name]
            done = await anyio.run_process(command, check=False, stderr=subprocess.STDOUT, env=environment)
            if done.returncode != 0:
                raise ConfigurationError(
                    f"image {name} cannot be built: {done.stdout.decode(errors='replace')[-2_000:]}",
                    hint=f"Build it on another machine, and put {name}.sif into --images-dir.",
                )

    async def _train(self) -> None:
        """Run the trainer once a node is ready, and end the job with it."""
        url = await self._ready_address()
        environment = {**os.environ, "ROLLOUT_URL": url, "ROLLOUT_KEY": self.folder.key}
        log_file = self.folder.log("trainer")
        self.exit_code = await KeptProcess(
            "trainer", self.spec.trainer, log_file, TRAINER_SECONDS, environment
        ).run_once()
        log.info("trainer ended", exit_code=self.exit_code)
        self._stop(requeue=False)

    async def _ready_address(self) -> str:
        while True:
            with suppress(OSError):
                for node in self.folder.published("nodes"):
                    with suppress(ClientError):
                        async with RolloutClient(node.url, self.folder.key, patience_seconds=0) as client:
                            if (await client.readiness()).ready:
                                return node.url
            await anyio.sleep(LOOK_SECONDS)

    def _stop(self, *, requeue: bool) -> None:
        if not self.stopping.is_set():
            self.requeue = requeue
            self.stopping.set()

    async def _follow_signals(self) -> None:
        numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
        with anyio.open_signal_receiver(*numbers) as signals:
            async for number in signals:
                log.info("the job drains", signal=number.name)
                self._stop(requeue=number == signal.SIGUSR1)

    async def _requeue(self) -> None:
        """Put the job back into the queue, unless it was cancelled, and wait until Slurm ends this step."""
        job = _own_id()
        for tries_left in reversed(range(REQUEUE_TRIES)):
            try:
                if (await commands.job_state(job)).state not in ("RUNNING", "PREEMPTED", "SUSPENDED"):
                    return
                log.info("the job goes back into the queue", job=job, node=node_name())
                await commands.requeue(job)
                break
            except ConfigurationError as error:
                if not tries_left:
                    raise
                log.warning("slurm does not take the job back yet; it is asked again", job=job, error=str(error))
                await anyio.sleep(ASK_AGAIN_SECONDS)
        await anyio.sleep(REQUEUE_SECONDS)


async def run_job(folder: JobFolder) -> int:
    """Run within the job's allocation; return the exit code.

    Raises:
        ServiceError: A part cannot be started.
    """
    if "SLURM_JOB_NODELIST" not in os.environ:
        raise ConfigurationError("this is not a job of Slurm", hint="Submit it: rollout-service slurm submit --help.")
    await _refuse_a_second(folder)
    for kind in ("nodes", "engines", "failures"):  # left by an earlier run, or an earlier job, that was killed
        folder.forget(kind)
    (folder.path / "redis" / "address").unlink(missing_ok=True)
    spec = folder.load().spec
    folder.save(Submitted(job=_own_id(), spec=spec))
    return await Supervisor(folder, spec).run()


def _own_id() -> str:
    return os.environ.get("SLURM_HET_JOB_ID_0") or os.environ["SLURM_JOB_ID"]


async def _refuse_a_second(folder: JobFolder) -> None:
    """Check that no other job works in the folder: two of them would write the same files.

    Raises:
        ConfigurationError: There is one.
    """
    known = folder.load().job
    of_array = f"{os.environ.get('SLURM_ARRAY_JOB_ID')}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    if known in ("", _own_id(), of_array):
        return
    try:
        state = (await commands.job_state(known)).state
    except ConfigurationError as error:
        log.warning("slurm does not say whether an earlier job has ended", job=known, error=str(error))
        return
    if state in ("RUNNING", "SUSPENDED"):
        raise ConfigurationError(
            f"job {known} works in {folder.path}",
            hint="Stop it, or make a folder for each job: rollout-service slurm submit --write-only --name NAME.",
        )
