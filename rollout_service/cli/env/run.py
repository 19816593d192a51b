"""Rolls out one task of an environment, and shows it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from pydantic import JsonValue

from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_service.cli import common
from rollout_service.cli.common import CommandError
from rollout_service.cli.env.check import environment_path, load_environment
from rollout_service.cli.env.engines import PoolModels, read_turns, scripted_engine
from rollout_service.cli.server_child import running_server
from rollout_service.cli.show.trajectory import render_rollout
from rollout_service.engines.errors import NoBackendError
from rollout_service.tokens.tokenizer import load_tokenizer

POOLS_HINT = (
    "The server of this command has only the pools that are named: add --pool-model POOL=MODEL or "
    "--pool-script POOL=FILE, or run it on a server that has the pool, with --url."
)
LOOK_SECONDS = 0.3
INSTANCE_HINT = """For example: --instance '{"question": "1+1"}'"""


@dataclass(frozen=True, slots=True)
class OwnServer:
    environment: str
    backend: str | None
    script: Path | None
    model: str | None
    sandbox: str | None
    pools: PoolModels

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RolloutClient]:
        turns = await anyio.to_thread.run_sync(read_turns, self.script) if self.script else None
        common.err().print("Starting a server")
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-env-"))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            tasks.start_soon(_print_warnings, Path(folder, "server.log"))
            backend = self.backend
            if self.script is not None and turns is not None:
                backend = (await stack.enter_async_context(scripted_engine(turns, self.script.name))).url
            engines = await stack.enter_async_context(self.pools.engines())
            try:
                client = await stack.enter_async_context(running_server(Path(folder), self._flags(backend)))
            except CommandError as error:  # its log, which names the cause, is printed, and goes with the folder
                raise CommandError(str(error).partition("\n")[0]) from error
            for engine in engines:
                await client.add_backend(engine)
            yield client

    def _flags(self, backend: str | None) -> list[str]:
        given = {
            "--environment": environment_path(self.environment),
            "--backend": backend,
            "--model": self.model,
            "--sandbox": self.sandbox,
        }
        flags = [str(part) for flag, value in given.items() if value is not None for part in (flag, value)]
        return [*flags, "--log-level", "warning"]


async def _print_warnings(log: Path) -> None:
    """Print the lines of a server's log as they come: failed attempts, tracebacks, and code that blocks the server."""
    position = 0
    try:
        while True:
            position += await anyio.to_thread.run_sync(_print_from, log, position)
            await anyio.sleep(LOOK_SECONDS)
    finally:
        _print_from(log, position)


def _print_from(log: Path, position: int) -> int:
    """Print the whole lines after a position, and return how many bytes that were."""
    if not log.exists():
        return 0
    with log.open("rb") as file:
        file.seek(position)
        lines = file.read().rpartition(b"\n")[0]
    if not lines:
        return 0
    common.err().print(lines.decode(errors="replace"), soft_wrap=True)
    return len(lines) + 1


async def run_one(
    own: OwnServer, index: int, instance: str | None, url: str | None, key: str | None, *, as_json: bool
) -> int:
    if url is not None and (own.pools.models or own.pools.scripts):
        raise CommandError(
            "with --url the engines of that server answer for all pools",
            hint="Leave --pool-model and --pool-script out, or --url.",
        )
    find = partial(_own_name, own) if url is None else partial(_name, own.environment)
    name = await anyio.to_thread.run_sync(find)
    given = parse_instance(instance) if instance is not None else None
    server = own.running() if url is None else common.connect(url, key)
    async with server as client:
        data = await _pick(client, name, index) if given is None else given
        request = RolloutRequest(task=Task(environment=name, instance=data))
        rollout = await client.run(request)
        paths = [view.tokenizer_path for view in await client.backends() if view.pool == request.pool]
    if as_json or not paths:
        common.print_json(rollout)
    else:
        tokenizer = load_tokenizer(paths[0], with_template=False)
        common.out().print(render_rollout(rollout, tokenizer, scripted=own.script is not None and url is None))
    if url is None and rollout.error is not None and rollout.error.code == NoBackendError.code:
        common.err().print(f"hint: {POOLS_HINT}", soft_wrap=True)
    return 0 if rollout.state is RolloutState.COMPLETED else 1


def _own_name(own: OwnServer) -> str:
    spec = load_environment(own.environment).spec
    pool = None if spec.parallel is None else spec.parallel.subagent.pool
    if pool is not None and pool not in {*own.pools.models, *own.pools.scripts}:
        raise CommandError(f"the sub-agents of {spec.name} need the pool {pool!r}", hint=POOLS_HINT)
    return spec.name


def _name(name_or_path: str) -> str:
    return load_environment(name_or_path).spec.name if environment_path(name_or_path) else name_or_path


async def _pick(client: RolloutClient, name: str, index: int) -> dict[str, JsonValue]:
    found = await client.dataset(name, limit=1, offset=index)
    if not found and index == 0:
        raise CommandError(
            f"{name} has no data set",
            hint=f"Pass the task's instance, or give the environment a data set. {INSTANCE_HINT}",
        )
    if not found:
        raise CommandError(
            f"{name} has no instance with index {index}; indices start at 0",
            hint="Pass another --index, or an --instance as JSON.",
        )
    return found[0]


def parse_instance(text: str) -> dict[str, JsonValue]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CommandError(f"--instance is not valid JSON: {error}", hint=INSTANCE_HINT) from error
    if not isinstance(value, dict):
        raise CommandError("--instance is not a JSON object", hint=INSTANCE_HINT)
    return value
