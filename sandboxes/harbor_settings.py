"""The settings that `--ek` gives to Harbor's sandboxes, and the one provider that trials with equal settings share.

Guarantee: the provider, with its guard process, lives as long as a trial uses it, and no longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from sandboxes import (
    ApptainerConfig,
    Network,
    Sandbox,
    SandboxConfigError,
    SandboxProvider,
    SandboxSpec,
    make_provider,
)


class HarborSandboxSettings(BaseModel):
    """The settings of a job's trials, each an argument `--ek NAME=VALUE`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sandbox: ApptainerConfig = ApptainerConfig()
    """The provider's settings, such as `{"fakeroot": true}`."""
    public_network: Network = "none"
    """The network of tasks that may have a public one: none, full (that of this host), or a list of hosts."""
    bases: Mapping[str, str] = {}
    """Images for the names after FROM, as `--base` of `rollout-service image build`."""
    images_dir: Path | None = None
    """Where images are kept; None is ROLLOUT_IMAGES_DIR, or a folder of the cache."""
    layers_dir: Path | None = None
    """Where layers of Dockerfiles are kept; None is a folder of the cache."""
    state_dir: Path | None = None
    """Where the provider notes its sandboxes; None is the default state folder."""

    @classmethod
    def pop_from(cls, arguments: dict[str, Any]) -> Self:
        given = {name: arguments.pop(name) for name in cls.model_fields if name in arguments}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            found = error.errors(include_url=False)[0]
            path = ".".join(map(str, found["loc"]))
            raise SandboxConfigError(
                f"--ek {path}: {found['msg']}",
                hint="docs/how-to/run-harbor-tasks.md has the names and values",
            ) from error


class SharedProvider:
    """A provider that is closed when the last trial has released it."""

    def __init__(self, provider: SandboxProvider, key: tuple[object, ...]) -> None:
        self._provider = provider
        self._key = key
        self._users = 0

    def take(self) -> Self:
        self._users += 1
        return self

    async def start(self, spec: SandboxSpec) -> Sandbox:
        return await self._provider.start(spec)

    async def release(self) -> None:
        """Count one trial less; call it once for each, shielded."""
        self._users -= 1
        if self._users == 0:
            del _shared[self._key]
            await self._provider.close()


_shared: dict[tuple[object, ...], SharedProvider] = {}


def shared_provider(settings: HarborSandboxSettings) -> SharedProvider:
    """Return the provider of this event loop for these settings.

    Raises:
        ProviderUnavailableError: Apptainer is not installed.
        SandboxConfigError: The settings contradict this host.
    """
    key = (asyncio.get_running_loop(), settings.sandbox, settings.state_dir, settings.images_dir)
    if (found := _shared.get(key)) is None:
        provider = make_provider(settings.sandbox, settings.state_dir, settings.images_dir)
        found = _shared[key] = SharedProvider(provider, key)
    return found.take()
