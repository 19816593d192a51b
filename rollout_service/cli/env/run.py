"""Rolls out one task of an environment, and shows it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio.to_thread
from pydantic import JsonValue

from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_service.cli import common
from rollout_service.cli.common import CommandError
from rollout_service.cli.env.check import environment_path, load_environment
from rollout_service.cli.env.script import read_turns, scripted_engine
from rollout_service.cli.server_child import running_server
from rollout_service.cli.show.trajectory import render_rollout
from rollout_service.tokens.tokenizer import load_tokenizer

INSTANCE_HINT = """For example: --instance '{"question": "1+1"}'"""


@dataclass(frozen=True, slots=True)
class OwnServer:
    """The server that `env run` starts unless it is given one."""

    environment: str
    backend: str | None
    script: Path | None
    model: str | None
    sandbox: str | None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[RolloutClient]:
        """Start the server, with the scripted model if there is a script."""
        turns = await anyio.to_thread.run_sync(read_turns, self.script) if self.script else None
        common.err().print("Starting a server")
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-env-"))
            backend = self.backend
            if turns is not None:
                backend = (await stack.enter_async_context(scripted_engine(turns))).url
            yield await stack.enter_async_context(running_server(Path(folder), self._flags(backend)))

    def _flags(self, backend: str | None) -> list[str]:
        """Return the flags of `rollout-service serve`."""
        given = {
            "--environment": environment_path(self.environment),
            "--backend": backend,
            "--model": self.model,
            "--sandbox": self.sandbox,
        }
        return [str(part) for flag, value in given.items() if value is not None for part in (flag, value)]


async def run_one(
    own: OwnServer, index: int, instance: str | None, url: str | None, key: str | None, *, as_json: bool
) -> int:
    """Roll out one task, show it, and return the exit code."""
    name = await anyio.to_thread.run_sync(_name, own.environment)
    given = parse_instance(instance) if instance is not None else None
    async with _server(own, url, key) as client:
        data = await _pick(client, name, index) if given is None else given
        request = RolloutRequest(task=Task(environment=name, instance=data))
        rollout = await client.run(request)
        tokenizer = (await client.backends())[0].model_path
    _show(rollout, tokenizer, scripted=own.script is not None and url is None, as_json=as_json)
    return 0 if rollout.state is RolloutState.COMPLETED else 1


@asynccontextmanager
async def _server(own: OwnServer, url: str | None, key: str | None) -> AsyncIterator[RolloutClient]:
    if url is not None:
        async with common.connect(url, key) as client:
            yield client
        return
    async with own.running() as client:
        yield client


def _name(name_or_path: str) -> str:
    return load_environment(name_or_path).spec.name if environment_path(name_or_path) else name_or_path


async def _pick(client: RolloutClient, name: str, index: int) -> dict[str, JsonValue]:
    found = await client.dataset(name, limit=1, offset=index)
    if not found:
        raise CommandError(
            f"{name} has no instance with index {index}; indices start at 0",
            hint="Pass another --index, or an --instance as JSON.",
        )
    return found[0]


def parse_instance(text: str) -> dict[str, JsonValue]:
    """Parse an instance.

    Raises:
        CommandError: The text is not a JSON object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise CommandError(f"--instance is not valid JSON: {error}", hint=INSTANCE_HINT) from error
    if not isinstance(value, dict):
        raise CommandError("--instance is not a JSON object", hint=INSTANCE_HINT)
    return value


def _show(rollout: Rollout, tokenizer: str, *, scripted: bool, as_json: bool) -> None:
    if as_json:
        common.print_json(rollout.model_dump(mode="json"))
    else:
        read = load_tokenizer(tokenizer, with_template=False)
        common.out().print(render_rollout(rollout, read, scripted=scripted))
