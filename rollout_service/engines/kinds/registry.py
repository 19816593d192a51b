"""The kinds of engines, built in and of plug-ins.

A kind is imported when the first engine of it is registered. One that cannot be loaded stops no other, and
registering an engine of it says why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from http import HTTPStatus
from importlib.metadata import EntryPoint, entry_points
from typing import Final, Protocol

import anyio
import anyio.to_thread

from api_schemas.inference import BackendSpec
from rollout_service.base.errors import ConfigurationError, InvalidFieldError, did_you_mean
from rollout_service.engines.contract import Backend
from rollout_service.engines.kinds.http_client import HttpClient

GROUP: Final = "rollout_service.engines"
"""The entry point group; each entry point is a `Connect`, such as a class that keeps the contract of `Backend`."""
SGLANG: Final = "sglang"
VLLM: Final = "vllm"
_ASK_SECONDS = 10.0
_CONTRACT: Final = tuple(name for name in vars(Backend) if not name.startswith("_"))


class Connect(Protocol):
    """Makes a backend for an address without asking the engine for anything."""

    def __call__(self, url: str, *, backend_id: str) -> Backend: ...


class EngineKinds:
    def __init__(self, *, plugins: Iterable[EntryPoint] | None = None) -> None:
        """`plugins` are by default those that are installed."""
        self._plugins = plugins
        self._loaded: dict[str, Connect] = {}

    @cached_property
    def _found(self) -> dict[str, set[str]]:
        """The values of the entry points of each name."""
        found = defaultdict(set)
        for plugin in entry_points(group=GROUP) if self._plugins is None else self._plugins:
            found[plugin.name].add(plugin.value)
        return dict(found)

    def check(self, kind: str) -> None:
        """Refuse a kind that is not declared, without importing any.

        Raises:
            InvalidFieldError: There is no such kind; the path is `kind`.
        """
        if kind not in self._found:
            known = sorted(self._found)
            hint = f"Known kinds: {', '.join(known)}. Install the plug-in of another one into the service's Python."
            if not known:
                hint = "Install rollout-service again: what is installed is older than its code."
            message = f"there is no kind of engine {kind!r}{did_you_mean(kind, known)}"
            raise InvalidFieldError.at("kind", message, hint=hint)

    def get(self, kind: str) -> Connect:
        """Return a connector; this imports the kind, so call it in a thread."""
        self.check(kind)
        if kind not in self._loaded:
            self._loaded[kind] = _load(kind, self._found[kind])
        return self._loaded[kind]

    async def connect(self, url: str, backend_id: str, kind: str) -> Backend:
        """Make a backend for the engine at `url`.

        Raises:
            InvalidFieldError: There is no such kind.
            ConfigurationError: The kind cannot be loaded, or does not keep the contract.
        """
        make = await anyio.to_thread.run_sync(self.get, kind)
        try:
            backend = make(url, backend_id=backend_id)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise ConfigurationError(
                f"the kind of engine {kind!r} makes no backend: {said}", hint="Correct the plug-in."
            ) from error
        if missing := [name for name in _CONTRACT if not hasattr(backend, name)]:
            raise ConfigurationError(
                f"the kind of engine {kind!r} makes a backend that lacks {', '.join(missing)}",
                hint="Keep the contract of rollout_service.engines.Backend.",
            )
        return backend


def _load(kind: str, values: set[str]) -> Connect:
    value, *others = sorted(values)
    if others:
        raise ConfigurationError(
            f"the kind of engine {kind!r} is declared more than once: {', '.join(sorted(values))}",
            hint="Uninstall all but one of these plug-ins, or have their authors rename them.",
        )
    where = f"the plug-in {kind!r} ({value})"
    try:
        loaded = EntryPoint(kind, value, GROUP).load()
    except Exception as error:
        raise ConfigurationError(
            f"{where} cannot be loaded: {type(error).__name__}: {error}",
            hint="Correct the plug-in, or install what it needs into the service's Python.",
        ) from error
    if not callable(loaded):
        raise ConfigurationError(
            f"{where} is not a kind of engine",
            hint="Name a class that keeps the contract of rollout_service.engines.Backend.",
        )
    connect: Connect = loaded
    return connect


def check_kinds(backends: Iterable[BackendSpec]) -> None:
    """Refuse a backend of the settings whose kind is not declared; those without one are asked later.

    Raises:
        ConfigurationError: There is no such kind; the message names the setting.
    """
    kinds = EngineKinds()
    for index, spec in enumerate(backends):
        if spec.kind is not None:
            try:
                kinds.check(spec.kind)
            except InvalidFieldError as error:
                raise ConfigurationError(str(error.under(f"backends.{index}")), hint=error.hint) from error


async def ask_kind(url: str) -> str:
    """Return the built-in kind of the engine at `url`.

    One that does not answer counts as SGLang, whose backend then reports that.
    """
    client = HttpClient(url)
    try:
        with anyio.fail_after(_ASK_SECONDS):
            if await _has(client, "/model_info") or not await _has(client, "/version"):
                return SGLANG
    except (OSError, UnicodeError):
        return SGLANG
    finally:
        await client.close()
    return VLLM


async def _has(client: HttpClient, path: str) -> bool:
    status, _ = await client.exchange("GET", path, None)
    return status == HTTPStatus.OK
