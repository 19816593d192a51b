"""Serves an environment to clients of OpenEnv, in the sandboxes that the settings configure."""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio
import anyio.to_thread

from rollout_service.authoring.openenv_server import EnvironmentServer
from rollout_service.cli import common
from rollout_service.cli.env.check import load_environment, read_dataset
from rollout_service.cli.env.engines import PoolModels
from rollout_service.environments.secrets import HostSecrets
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.settings import is_loopback, load_settings
from sandboxes import make_provider


def check_host(host: str, *, without_key: bool) -> None:
    """Refuse an address at which strangers could start sandboxes, unless that is wanted.

    Raises:
        CommandError: It is beyond loopback.
    """
    if not without_key and not is_loopback(host):
        raise common.CommandError(
            f"{host} is beyond loopback, and clients of OpenEnv have no key",
            hint="Listen on 127.0.0.1 and tunnel to it, or add --without-key in a network that you trust.",
        )


async def serve(name_or_path: str, host: str, port: int, max_sessions: int, pools: PoolModels) -> None:
    """Serve until the command is ended; print the address once it is served."""
    settings = load_settings()
    environment = await anyio.to_thread.run_sync(load_environment, name_or_path)
    dataset = await anyio.to_thread.run_sync(read_dataset, environment)
    with tempfile.TemporaryDirectory(prefix="rollout-serve-") as state:
        secrets = HostSecrets(settings.secrets)
        provider = make_provider(settings.sandbox, Path(state), settings.images_dir)
        try:
            async with pools.opened(Path(state)) as models:
                source = SandboxSource(provider, secrets=secrets)
                server = EnvironmentServer(environment, dataset, source, max_sessions, models)
                async with server.listening(host, port) as url:
                    common.out().print(url, soft_wrap=True)
                    await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await provider.close()
