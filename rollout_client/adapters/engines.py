"""The engines of a trainer, in a pool of the service, for as long as the trainer runs.

Before a rollout begins, the service has the engines that the trainer handed over, and knows the version of their
weights. They are registered under a lease that a thread renews, whatever the trainer's own loop does: after a crash,
the service removes them and cancels the trainer's rollouts. Processes with the same engines share their pool.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from anyio import to_thread
from pydantic import HttpUrl, TypeAdapter

from api_schemas.inference import BackendSpec, ExternalWeights
from rollout_client.adapters.submit import RolloutSubmitter
from rollout_client.errors import ClientError, ConflictError, NotFoundError
from rollout_client.sync import SyncRolloutClient

log = logging.getLogger(__name__)

LEASE_SECONDS = 60.0
_URL = TypeAdapter(HttpUrl)
_CLOSE_SECONDS = 5.0


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
        self._name, self._options, self._lease_seconds = name, options, lease_seconds
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._renewing: threading.Thread | None = None
        self._backends: Mapping[str, str] = {}
        """Ids by address."""
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
        return wanted == list(self._backends) and version in (None, self.version)

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
            with self._client(_CLOSE_SECONDS) as client:
                for backend_id in backends.values():
                    _remove(client, backend_id)
        except ClientError as error:
            log.warning("engines stay registered until their lease runs out: %s", error)

    def _follow(self, wanted: list[str], version: int | None) -> None:
        with self._lock:
            if self._follows(wanted, version):  # another rollout has done it meanwhile
                return
            if not self._backends and self.submitter.pool == "policy":
                digest = hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:8]
                self.submitter = replace(self.submitter, pool=f"{self._name}-{digest}")
            with self._client(self.submitter.patience_seconds) as client:
                gone = {url: one for url, one in self._backends.items() if url not in wanted}
                kept = {url: self._backends.get(url) or self._register(client, url) for url in wanted}
                for backend_id in gone.values():
                    _remove(client, backend_id)
                self._backends = kept
                if version is not None and version != self.version:
                    self._note(client, version)
            if self._renewing is None:
                self._ended.clear()
                self._renewing = threading.Thread(target=self._renew, name="engine leases", daemon=True)
                self._renewing.start()
                atexit.register(self.close)

    def _register(self, client: SyncRolloutClient, url: str) -> str:
        spec = BackendSpec(
            url=_URL.validate_python(url),
            pool=self.submitter.pool,
            lease_seconds=self._lease_seconds,
            **self._options,
        )
        return client.add_backend(spec).backend_id

    def _note(self, client: SyncRolloutClient, version: int) -> None:
        """Tell the service the version; the first one replaces whatever the engines report."""
        try:
            self._tell(client, version, force=self.version is None)
        except ConflictError as error:  # another process of the trainer is ahead of this one
            log.info("the service has a later version than %d: %s", version, error)
        self.version = version

    def _tell(self, client: SyncRolloutClient, version: int, *, force: bool) -> None:
        weights = ExternalWeights(type="external")
        client.update_weights(weights, version, pool=self.submitter.pool, force=force)

    def _renew(self) -> None:
        while not self._ended.wait(self._lease_seconds / 3):
            try:
                with self._client(self._lease_seconds / 3) as client, self._lock:
                    for url, backend_id in self._backends.items():
                        self._renew_one(client, url, backend_id)
            except ClientError as error:
                log.warning("the lease of the engines was not renewed; trying again: %s", error)

    def _renew_one(self, client: SyncRolloutClient, url: str, backend_id: str) -> None:
        try:
            client.renew_backend(backend_id)
        except NotFoundError:  # the service was away, or started anew, for longer than the lease
            self._register(client, url)
            if self.version is not None:
                self._tell(client, self.version, force=True)

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
