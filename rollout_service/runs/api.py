"""Callers' requests about runs: validated, made durable, and answered with the run as on the wire or its export."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio.to_thread
import structlog

from api_schemas.errors import FieldError
from api_schemas.exports import ExportedNode, ExportedRun, ExportedSample, ExportEnd, ExportLine
from api_schemas.rollouts.trees import NodeDetail
from api_schemas.runs import (
    AppendTasks,
    DatasetTasks,
    FileTasks,
    InlineTasks,
    Run,
    RunCounts,
    RunPatch,
    RunRequest,
    RunState,
    TaskSource,
)
from api_schemas.tasks import Task
from rollout_service.base.errors import ConflictError, InvalidFieldError, NotFoundError, prefix_field_paths
from rollout_service.engines.serving.subagent_pools import check_subagent_pool, check_trained_pool
from rollout_service.environments.contract import Environment
from rollout_service.gateway.bounds import check_sampling
from rollout_service.groups.auxiliary import run_warnings
from rollout_service.http.keyring import Role
from rollout_service.pipeline.branching import why_unbranched
from rollout_service.runs.dataset import open_dataset
from rollout_service.runs.manager import ManagerOf
from rollout_service.runs.planning import problem_of
from rollout_service.runs.task_files import Rows, open_file
from rollout_service.store.rules import dropped_counts
from rollout_service.store.runs_contract import RunRecord, RunStore

CheckEnvironment = Callable[[str], Awaitable[Environment]]
"""Returns the environment of a name, whose image can be used; raises InvalidFieldError at `environment`."""


log = structlog.get_logger(__name__)

_CHANGEABLE = {"priority", "weight", "max_concurrent", "max_failed_in_a_row", "max_dropped_in_a_row"}
"""The fields of a request that a patch may change."""


class RunService:
    """The operations that callers may perform on runs.

    Raises:
        NotFoundError: There is no such run; every method that takes an id can raise it.
        ConflictError: The run is in a state that does not allow the change.
        StoreError: The store fails; every method can raise it.
    """

    def __init__(
        self,
        runs: RunStore,
        manager_of: ManagerOf,
        *,
        check_environment: CheckEnvironment,
        check_pool: Callable[[str], None],
        data_dirs: Sequence[Path] = (),
    ) -> None:
        """Callers who are not administrators may name only files in `data_dirs`."""
        self._runs = runs
        self._manager_of = manager_of
        self._check_environment = check_environment
        self._check_pool = check_pool
        self._data_dirs = data_dirs

    async def create(self, request: RunRequest, role: Role) -> tuple[Run, bool]:
        """Validate a run, whose `run_id` must be set, and make it durable; return it and whether it is new.

        Raises:
            InvalidFieldError: The request is invalid; the error has the paths at fault.
            NoBackendError: The pool has no backend.
            ConflictError: The id is taken by a different request.
        """
        if (known := await self._known(request)) is not None:
            return known, False
        self._manager_of(request.run_id or "").chain(request)
        check_trained_pool(request.pool)
        check_sampling(request.sampling)
        self._check_pool(request.pool)
        source = request.source
        digest = None
        if isinstance(source, InlineTasks):
            await self._check_inline(source)
            tasks = len(source.tasks)
        else:
            rows = await self._open(source, role)
            tasks, digest = len(rows), rows.digest
        await self._check_fit(request, _environments(source))
        record, new = await self._runs.create(request, tasks=tasks, digest=digest, version=request.version)
        view = self.view(record)
        if new:
            log.info("run created", run=record.run_id, pool=request.pool, tasks=tasks, source=source.kind)
            for warning in view.warnings:
                log.warning("a run may not do what it is meant to do", run=record.run_id, warning=warning)
        return view, new

    async def _known(self, request: RunRequest) -> Run | None:
        """Return the run that the same request has created, whatever became of its file or its pool since."""
        try:
            run = await self._runs.get(request.run_id or "")
        except NotFoundError:
            return None
        run, _ = await self._runs.create(request, tasks=run.tasks, digest=run.digest, version=request.version)
        return self.view(run)

    async def _find(self, name: str) -> Environment:
        """Return an environment whose image and whose sub-agents' pool can be used."""
        environment = await self._check_environment(name)
        check_subagent_pool(environment.spec, self._check_pool)
        return environment

    async def _open(self, source: FileTasks | DatasetTasks, role: Role) -> Rows:
        with prefix_field_paths("body.source"):
            environment = await self._find(source.environment)
        if isinstance(source, DatasetTasks):
            return await anyio.to_thread.run_sync(open_dataset, source, environment)
        folders = None if role.allows(Role.ADMIN) else self._data_dirs
        return await anyio.to_thread.run_sync(open_file, source, environment.check, folders)

    async def _check_inline(self, source: InlineTasks) -> None:
        if not (source.open or source.tasks):
            problem = FieldError(path="body.source.tasks", message="the list is empty")
            raise InvalidFieldError([problem], hint="Add tasks, or set `open` and append them later.")
        await self._check_tasks(source.tasks, "body.source.tasks")

    async def _check_tasks(self, tasks: list[Task], field: str) -> None:
        environments: dict[str, Environment] = {}
        for name, path in _environments_of(tasks, field).items():
            with prefix_field_paths(path.removesuffix(".environment")):
                environments[name] = await self._find(name)
        await anyio.to_thread.run_sync(_check_instances, tasks, environments, field)

    async def _check_fit(self, request: RunRequest, environments: Mapping[str, str]) -> None:
        """Refuse environments that cannot do what the run asks for; `environments` has their paths by name."""
        if request.auxiliary is not None:
            hint = "Leave `auxiliary` out, or give the environment a section `[parallel]`."
            await self._require(environments, _why_no_subagents, hint)
        if request.branching is not None:
            await self._require(environments, why_unbranched, "Leave `branching` out.")

    async def _require(
        self, environments: Mapping[str, str], why_not: Callable[[Environment], str | None], hint: str
    ) -> None:
        problems = [
            FieldError(path=path, message=why)
            for name, path in environments.items()
            if (why := why_not(await self._check_environment(name))) is not None
        ]
        if problems:
            raise InvalidFieldError(problems, hint=hint)

    async def append(self, run_id: str, order: AppendTasks) -> Run:
        """
        Raises:
            InvalidFieldError: A task is invalid; the error has the paths at fault.
            ConflictError: The run takes no more tasks, or has another number of them.
        """
        run = await self._runs.get(run_id)
        if run.request.live is not None and order.tasks:
            raise ConflictError(
                f"run {run_id} trains on live sessions, and the service appends their parts",
                hint="Append tasks to a run without `live`.",
            )
        await self._check_tasks(order.tasks, "body.tasks")
        await self._check_fit(run.request, _environments_of(order.tasks, "body.tasks"))
        record = await self._runs.append(run_id, order.tasks, offset=order.offset, close=order.close)
        return self.view(record)

    async def patch(self, run_id: str, patch: RunPatch) -> Run:
        """Pause, resume or end a run, set the trainer's version, or change the run's share."""
        changes = patch.model_dump(include=_CHANGEABLE, exclude_none=True)
        updated = await self._runs.update(run_id, state=patch.state, version=patch.version, changes=changes)
        if patch.state is not None:
            log.info("run changed", run=run_id, state=updated.state)
        return self.view(updated)

    async def end(self, run_id: str) -> Run:
        """End a run; batches of groups that are ready can still be leased."""
        ended = await self._runs.update(run_id, state=RunState.ENDED)
        log.info("run ended", run=run_id, state=ended.state)
        return self.view(ended)

    async def get(self, run_id: str, *, parallel: bool = False) -> Run:
        """`parallel` adds the use of sub-agents."""
        return self.view(await self._runs.get(run_id), parallel=parallel)

    async def list(self) -> list[Run]:
        return [self.view(run) for run in await self._runs.list()]

    def view(self, run: RunRecord, *, parallel: bool = False) -> Run:
        """`parallel` adds the use of sub-agents."""
        over, manager = run.state in (RunState.ENDED, RunState.FINISHED), self._manager_of(run.run_id)
        return Run(
            run_id=run.run_id,
            state=run.state,
            request=run.request,
            version=run.version,
            tasks=run.tasks,
            cursor=run.cursor,
            acceptance_rate=manager.acceptance_rate(run),
            counts=RunCounts(
                open=run.count("open"),
                ready=run.count("ready"),
                batched=run.count("batched"),
                acknowledged=run.count("acknowledged"),
                dropped=dropped_counts(run.counters),
                samples_masked=run.count("masked"),
                samples_stale=run.count("masked:stale"),
                samples_retried=run.count("retried"),
                batches_acknowledged=run.count("batches:acknowledged"),
            ),
            problem=problem_of(run),
            warnings=[*run_warnings(run.request, run.total), *manager.warnings(run)],
            parallel=manager.parallel(run) if parallel else None,
            created_at=run.created_at,
            ended_at=run.changed_at if over else None,
        )


def _check_instances(tasks: Sequence[Task], environments: Mapping[str, Environment], field: str) -> None:
    """Check all instances; call it in a thread, since tens of thousands take seconds."""
    for number, task in enumerate(tasks):
        with prefix_field_paths(f"{field}.{number}"):
            environments[task.environment].check(task.instance)


def _why_no_subagents(environment: Environment) -> str | None:
    if environment.spec.parallel is not None:
        return None
    return f"the environment {environment.spec.name!r} has no sub-agents to reward"


def _environments(source: TaskSource) -> dict[str, str]:
    """Return the path of each environment's first mention."""
    if isinstance(source, InlineTasks):
        return _environments_of(source.tasks, "body.source.tasks")
    return {source.environment: "body.source.environment"}


def _environments_of(tasks: Sequence[Task], field: str) -> dict[str, str]:
    first: dict[str, str] = {}
    for number, task in enumerate(tasks):
        first.setdefault(task.environment, f"{field}.{number}.environment")
    return first


GZIP = 16 + zlib.MAX_WBITS
_LEVEL = 1


class RunExporter:
    """Writes a run as JSON Lines, group by group.

    Reading an export returns exactly the service's data. One group is in memory at a time, and nothing is compressed on
    the event loop. A run that still runs is exported with the groups that were closed when the export started,
    without those that retention deletes meanwhile; one that asks for neither sub-agents nor live sessions, in the
    format 1.
    """

    def __init__(self, runs: RunStore, run_service: RunService) -> None:
        self._runs = runs
        self._run_service = run_service

    async def start(self, run_id: str, *, compressed: bool) -> AsyncIterator[bytes]:
        """
        Raises:
            NotFoundError: There is no such run; raised before the first piece.
        """
        run = await self._run_service.get(run_id)
        is_plain = run.request.nodes is NodeDetail.NONE and run.request.live is None
        head = ExportedRun(format=1 if is_plain else 2, run=run)
        return self._pieces(run_id, head, await self._runs.closed_groups(run_id), compressed=compressed)

    async def _pieces(
        self, run_id: str, head: ExportedRun, groups: Sequence[int], *, compressed: bool
    ) -> AsyncIterator[bytes]:
        packer = zlib.compressobj(_LEVEL, wbits=GZIP) if compressed else None
        yield _packed(_line(head), packer)
        count = 0
        for number in groups:
            samples: Sequence[ExportedSample] = ()
            with suppress(NotFoundError):  # retention was faster
                samples = await self._runs.exported_samples(run_id, number)
            for sample in samples:
                count += 1
                yield await anyio.to_thread.run_sync(_packed_sample, sample, packer)
        yield _packed(_line(ExportEnd(samples=count)), packer)
        if packer is not None:
            yield packer.flush()


def _line(model: ExportLine) -> bytes:
    return model.model_dump_json().encode() + b"\n"


def _packed_sample(sample: ExportedSample, packer: zlib._Compress | None) -> bytes:
    """Return the lines of a sample and of its rollout's sub-agents."""
    rollout = sample.sample.rollout
    if rollout.nodes:
        bare = sample.sample.model_copy(update={"rollout": rollout.model_copy(update={"nodes": []})})
        sample = sample.model_copy(update={"sample": bare})
    nodes = (ExportedNode(rollout_id=rollout.rollout_id, node=node) for node in rollout.nodes)
    return _packed(b"".join([_line(sample), *map(_line, nodes)]), packer)


def _packed(line: bytes, packer: zlib._Compress | None) -> bytes:
    return line if packer is None else packer.compress(line)
