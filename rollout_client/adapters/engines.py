"""The engines of a trainer, in a pool of the service, for as long as the trainer runs.

Before a rollout begins, the service has the engines that the trainer handed over, and knows the version of their
weights. They are registered under a lease that a thread renews, whatever the trainer's own loop does, and whatever
becomes of the others: after a crash, the service removes them and cancels the trainer's rollouts. Processes with the
same engines share their pool.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
import httpx
from anyio import to_thread
from pydantic import HttpUrl, TypeAdapter

from api_schemas.inference import BackendSpec, ExternalWeights
from rollout_client._connection import authorization, find_proxy
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.calls.engines import backend_path
from rollout_client.client import RolloutClient
from rollout_client.errors import ClientError, ConflictError, NotFoundError
from rollout_client.sync import SyncRolloutClient

log = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
_URL = TypeAdapter(HttpUrl)
_CLOSE_SECONDS = 5.0
_EXTERNAL = ExternalWeights(type="external")


class TrainerEngines:
    """Registers the engines of one trainer, and says which weights they have.

    `name` begins the name of their pool, unless `submitter` names a pool other than `policy`. `options` are those of
    `BackendSpec`, such as `kind` and `tokenizer`.
    """

    def __init__(
        self,
        name: str,
        submitter: RolloutSubmitter,
        *,
        lease_seconds: float = LEASE_SECONDS,
        **options: Any,
    ) -> None:
        self._name, self._given, self._options, self._lease_seconds = name, submitter, options, lease_seconds
        self._lock = threading.Lock()
        """Held by whoever changes the engines, which may take long; renewals do not wait for it."""
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None
        self._backends: Mapping[str, str] = {}
        """Ids by address. It is replaced as a whole, since several threads read it."""
        self.submitter = submitter
        self.version: int | None = None
        """The last one that the service was told."""

    async def follow(self, addresses: Iterable[str], version: int | None = None) -> RolloutSubmitter:
        """Have exactly these engines registered, with this version of the weights; return `submitter`.

        Without a version, the engines report their own. Nothing is sent if nothing has changed.

        Raises:
            ClientError: The service refuses an engine, or cannot be reached.
        """
        wanted = sorted({_normal(address) for address in addresses})
        if wanted and not self._follows(wanted, version):
            await to_thread.run_sync(self._follow, wanted, version)
        return self.submitter

    def _follows(self, wanted: list[str], version: int | None) -> bool:
        return wanted == sorted(self._backends) and version in (None, self.version)

    def close(self) -> None:
        """Remove the engines from the service; idempotent."""
        self._ended.set()
        atexit.unregister(self.close)
        if self._renewing is not None:
            self._renewing.join()
        with self._lock:
            backends, self._backends, self._renewing = self._backends, {}, None
            self.version = None
        if not backends:
            return
        try:
            self._remove_all(backends.values())
        except httpx.HTTPError as error:
            log.warning("engines stay registered until their lease runs out: %s", error)

    def _remove_all(self, backend_ids: Iterable[str]) -> None:
        """Remove engines without a thread, since Python starts none while it ends."""
        given = self.submitter
        with httpx.Client(
            base_url=given.url,
            headers=authorization(given.key),
            timeout=_CLOSE_SECONDS,
            verify=httpx.create_ssl_context(),
            proxy=find_proxy(httpx.URL(given.url)),
            trust_env=False,
        ) as client:
            for backend_id in backend_ids:
                answer = client.delete(backend_path(backend_id))
                if answer.status_code != httpx.codes.NOT_FOUND:
                    answer.raise_for_status()

    def _follow(self, wanted: list[str], version: int | None) -> None:
        with self._lock:
            if self._follows(wanted, version):  # another rollout has done it meanwhile
                return
            if not self._backends and self._given.pool == "policy":
                digest = hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:8]
                self.submitter = replace(self._given, pool=f"{self._name}-{digest}")
            with self._client(self.submitter.patience_seconds) as client:
                for url in wanted:
                    if url not in self._backends:
                        self._backends = {**self._backends, url: client.add_backend(self._spec(url)).backend_id}
                        self._begin_renewals()
                gone = [one for url, one in self._backends.items() if url not in wanted]
                self._backends = {url: self._backends[url] for url in wanted}
                for backend_id in gone:
                    _remove(client, backend_id)
                if version is not None and version != self.version:
                    self._note(client, version)

    def _begin_renewals(self) -> None:
        if self._renewing is None:
            self._ended.clear()
            self._renewing = threading.Thread(target=self._renew, name="engine leases", daemon=True)
            self._renewing.start()
            atexit.register(self.close)

    def _spec(self, url: str) -> BackendSpec:
        return BackendSpec(
            url=_URL.validate_python(url),
            pool=self.submitter.pool,
            lease_seconds=self._lease_seconds,
            **self._options,
        )

    def _note(self, client: SyncRolloutClient, version: int) -> None:
        """Tell the service the version; the first one replaces whatever the engines report."""
        try:
            client.update_weights(_EXTERNAL, version, pool=self.submitter.pool, force=self.version is None)
        except ConflictError as error:  # another process of the trainer is ahead of this one
            log.info("the service has a later version than %d: %s", version, error)
        self.version = version

    def _renew(self) -> None:
        while not self._ended.wait(self._lease_seconds / 3):
            try:
                anyio.run(self._renew_all)
            except Exception as error:  # noqa: BLE001 - without this thread the engines would leave the service
                log.warning("the leases of the engines were not renewed; trying again: %s", error)

    async def _renew_all(self) -> None:
        """Renew the leases, in time for the next renewal whatever a single engine does."""
        given, seconds = self.submitter, self._lease_seconds
        async with RolloutClient(given.url, given.key, patience_seconds=seconds / 3) as client:
            with anyio.move_on_after(seconds / 2):
                async with anyio.create_task_group() as tasks:
                    for url, backend_id in self._backends.items():
                        tasks.start_soon(self._renew_one, client, url, backend_id)
                await self._remind(client)

    async def _renew_one(self, client: RolloutClient, url: str, backend_id: str) -> None:
        try:
            try:
                await client.renew_backend(backend_id)
            except NotFoundError:  # it was removed, or the service was away for longer than the lease
                if url in self._backends:
                    await client.add_backend(self._spec(url))
        except ClientError as error:
            log.warning("the lease of %s was not renewed; trying again: %s", url, error)

    async def _remind(self, client: RolloutClient) -> None:
        """Tell a service that was started anew the version again, since it has only what its engines report."""
        version, known = self.version, set(self._backends.values())
        if version is None:
            return
        served = [one.weight_version for one in await client.backends() if one.backend_id in known]
        if min(served, default=version) < version:
            with suppress(ConflictError):  # another process of the trainer is ahead of this one
                await client.update_weights(_EXTERNAL, version, pool=self.submitter.pool)

    def _client(self, patience_seconds: float) -> SyncRolloutClient:
        return SyncRolloutClient(self.submitter.url, self.submitter.key, patience_seconds=patience_seconds)


def _normal(address: str) -> str:
    url = address if "://" in address else f"http://{address}"
    return str(_URL.validate_python(url)).removesuffix("/").removesuffix("/v1")


def _remove(client: SyncRolloutClient, backend_id: str) -> None:
    try:
        client.remove_backend(backend_id)
    except NotFoundError:
        log.debug("the service has removed %s already", backend_id)
