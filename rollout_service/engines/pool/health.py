"""Health checks of a pool's backends, by probes and by failed requests.

A backend that stops answering leaves service within a few probes, and its open requests move elsewhere. It comes back
after several successful probes, with the pool's weights and pause state.
"""

from dataclasses import replace

import anyio
import structlog

from api_schemas.inference import BackendState
from rollout_service.base.errors import StoreError
from rollout_service.engines.errors import BackendUnreachable, InferenceError
from rollout_service.engines.pool.backend_handle import BackendHandle, sample_token
from rollout_service.engines.pool.registry import BackendRegistry, PoolOptions
from rollout_service.engines.pool.weights.controller import PoolController

log = structlog.get_logger(__name__)


class HealthChecks:
    def __init__(self, registry: BackendRegistry, controller: PoolController, options: PoolOptions) -> None:
        self._registry = registry
        self._controller = controller
        self._options = options

    async def watch(self, handle: BackendHandle) -> None:
        while True:
            await anyio.sleep(self._options.probe_interval)
            await self._probe(handle)

    async def suspect(self, handle: BackendHandle, error: InferenceError) -> None:
        """Count a failed request, and take out a backend that is at fault for it."""
        handle.record_failure(error)
        handle.bad_in_a_row += 1
        if handle.state is BackendState.FAILED:
            return  # it is out of service already, and the request goes elsewhere at once
        if isinstance(error, BackendUnreachable):
            await self._check(handle)
        elif handle.bad_in_a_row >= self._options.unhealthy_after:
            self._registry.take_out(handle)

    async def _check(self, handle: BackendHandle) -> None:
        """Probe a backend, once for all requests that fail meanwhile.

        After several failures in a row, it has to sample a token: otherwise the requests are at fault, and their
        repetitions must not take the backend from all others.
        """
        if handle.check is not None:
            await handle.check.wait()
            return
        handle.check = done = anyio.Event()
        samples = handle.bad_in_a_row >= self._options.unhealthy_after
        try:
            if await self._probe_error(handle, samples=samples) is not None:
                self._registry.take_out(handle)
            elif samples:
                handle.bad_in_a_row = 0
        finally:
            done.set()
            handle.check = None

    async def _probe(self, handle: BackendHandle) -> None:
        error = await self._probe_error(handle)
        if error is not None:
            handle.record_failure(error)
            handle.bad_probes += 1
            if handle.bad_probes >= self._options.unhealthy_after:
                self._registry.take_out(handle)
            return
        handle.bad_probes = 0
        handle.good_probes += 1
        if handle.state is BackendState.FAILED and handle.good_probes >= self._options.healthy_after:
            await self._bring_back(handle)

    async def _probe_error(self, handle: BackendHandle, *, samples: bool = False) -> InferenceError | None:
        seconds, is_paused = self._options.probe_timeout, self._registry.paused is not None
        try:
            with anyio.fail_after(seconds):
                await handle.backend.health(paused=is_paused)
                if samples and not is_paused:
                    await sample_token(handle.backend)
        except TimeoutError:
            why = f"no answer to a probe in {seconds:g} s: it hangs, or its host is overloaded"
            return BackendUnreachable(why, backend_id=handle.id)
        except Exception as error:  # noqa: BLE001 - a plug-in's defect is its engine's failure alone
            return handle.typed(error)
        return None

    async def _bring_back(self, handle: BackendHandle) -> None:
        """Give an engine the pool's weights before any request, since it may have restarted, with another model."""
        try:
            async with self._controller.joining():
                info = await handle.backend.model_info()
                self._registry.refuse_other_vocabulary(handle.id, info.vocab_size)
                version = await self._controller.synchronize(handle.backend, info.weight_version)
                if handle.state is BackendState.FAILED:
                    info = replace(info, weight_version=version, extras=handle.info.extras)
                    handle.bring_back(info, is_tried=self._registry.paused is None)
                    log.info("backend is back", backend_id=handle.id, pool=self._registry.name, weight_version=version)
        except StoreError as error:  # other services may be commanding the pool
            handle.record_failure(error)
        except Exception as error:  # noqa: BLE001
            handle.record_failure(handle.typed(error))
        self._registry.notify()
