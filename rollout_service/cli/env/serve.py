"""Serves an environment to clients of OpenEnv, in the sandboxes that the settings configure."""

from __future__ import annotations

import anyio
import anyio.to_thread

from rollout_service.authoring.openenv_server import EnvironmentServer
from rollout_service.cli import common
from rollout_service.cli.env.check import load_environment, read_dataset
from rollout_service.cli.env.engines import PoolModels
from rollout_service.settings import is_loopback, load_settings


def check_host(host: str, *, without_key: bool) -> None:
    """Refuse an address at which strangers could start sandboxes, unless `without_key` is set."""
    if not without_key and not is_loopback(host):
        raise common.CommandError(
            f"{host} is beyond loopback, and clients of OpenEnv have no key",
            hint="Listen on 127.0.0.1 and tunnel to it, or add --without-key in a network that you trust.",
        )


async def serve(name_or_path: str, host: str, port: int, max_sessions: int, pools: PoolModels) -> None:
    environment = await anyio.to_thread.run_sync(load_environment, name_or_path)
    dataset = await anyio.to_thread.run_sync(read_dataset, environment)
    async with pools.trial(load_settings()) as (sandboxes, models):
        server = EnvironmentServer(environment, dataset, sandboxes, max_sessions, models)
        async with server.listening(host, port) as url:
            common.out().print(url, soft_wrap=True)
            await anyio.sleep_forever()
