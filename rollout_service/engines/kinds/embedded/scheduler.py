"""The embedded engine: one thread that owns the model, the KV and every running request.

Continuous batching: requests join and leave between two steps. A step prefills at most a chunk of waiting prompts, then
samples one token for every running request. Running requests have slots 0 to n-1 of the KV store, so a batch is a view;
a prompt is prefilled in an extra slot and moved in. Of one budget of KV, in tokens, the largest possible length of each
running request is reserved, and the prefix cache gets the rest.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from api_schemas.inference import PauseMode
from rollout_service.engines.kinds.embedded.bodies import likeliest
from rollout_service.engines.kinds.embedded.cache import PrefixCache
from rollout_service.engines.kinds.embedded.job import EngineJob
from rollout_service.engines.kinds.embedded.model import KVStore, Qwen3
from rollout_service.engines.kinds.embedded.sampler import sample
from rollout_service.engines.kinds.embedded.weights import ModelError

T = TypeVar("T")
UNNAMED_VERSION = "default"
_ABORTED = "Aborted by request"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    max_running: int = 64
    kv_tokens: int = 131_072
    """For running requests and the prefix cache together."""
    prefill_chunk: int = 512
    """Prompt tokens processed between two tokens of the running requests."""


@dataclass(slots=True)
class EngineStats:
    running: int = 0
    waiting: int = 0
    reserved_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    busy_seconds: float = 0.0


@dataclass(slots=True)
class _Update:
    model: Qwen3
    path: str
    version: str
    flush_cache: bool
    done: "Future[None]"


class EngineBusyError(Exception):
    """The order cannot be carried out while requests hold KV."""


class EngineCore:
    """Runs requests on a separate thread, from `start` to `stop`; `decode` is for stop texts."""

    def __init__(
        self,
        model_path: str,
        options: EngineOptions | None = None,
        *,
        decode: Callable[[list[int]], str] | None = None,
        weight_version: str = UNNAMED_VERSION,
    ) -> None:
        self.options = options or EngineOptions()
        self.model_path = model_path
        self.weight_version = weight_version
        self.stats = EngineStats()
        self.paused = False
        self._model = Qwen3(Path(model_path))
        # As in SGLang, an update changes the weights but not the end-of-sequence ids.
        self.eos_token_ids = self._model.config.eos_token_ids
        self._decode = decode
        self._store = KVStore(self._model.config, self.options.max_running + 1)
        self._cache = PrefixCache(self.options.kv_tokens)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[EngineJob] = deque()
        self._running: list[EngineJob] = []
        self._filling: EngineJob | None = None
        self._filled = 0
        self._updates: deque[_Update] = deque()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def context_length(self) -> int:
        return min(self._model.config.context_length, self.options.kv_tokens)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # ---- called from other threads

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._order(self._stop)
        self._thread.join()

    def submit(self, job: EngineJob) -> None:
        """Queue `job`, which must fit the context."""
        self._commands.put(lambda: self._waiting.append(job))

    def abort(self, rid_prefix: str | None) -> "Future[None]":
        """Abort the requests whose id starts with `rid_prefix`, or all for None; they keep their output so far."""
        return self._order(lambda: self._abort(rid_prefix))

    def pause(self, mode: PauseMode) -> "Future[None]":
        return self._order(lambda: self._pause(mode))

    def resume(self) -> "Future[None]":
        return self._order(self._resume)

    def flush_cache(self) -> "Future[None]":
        """Empty the prefix cache; while requests run, the future gets an `EngineBusyError` instead."""
        return self._order(self._flush)

    def set_version(self, version: str) -> "Future[None]":
        return self._order(lambda: setattr(self, "weight_version", version))

    def update_weights(self, path: str, version: str | None, *, flush_cache: bool) -> "Future[None]":
        """Load the weights in `path`: at once in a pause, otherwise after the running requests."""
        model = Qwen3(Path(path))
        if replace(model.config, eos_token_ids=self.eos_token_ids) != self._model.config:
            raise ModelError(f"the model in {path} has another shape than the one that is being served")
        done: Future[None] = Future()
        update = _Update(model, path, version or self.weight_version, flush_cache, done)
        self._commands.put(lambda: self._updates.append(update))
        return done

    def _order(self, action: Callable[[], T]) -> "Future[T]":
        done: Future[T] = Future()

        def carry_out() -> None:
            try:
                done.set_result(action())
            except EngineBusyError as error:
                done.set_exception(error)

        self._commands.put(carry_out)
        return done

    # ---- the engine's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._obey()
                self._apply_updates()
                if not self.paused and not self._stopping:
                    started = time.perf_counter()
                    self._prefill()
                    self._decode_step()
                    self.stats.busy_seconds += time.perf_counter() - started
                self.stats.running = len(self._running) + (self._filling is not None)
                self.stats.waiting = len(self._waiting)
        finally:  # even after a bug: nobody may wait for a thread that has ended
            self._stopping = True
            self._abort(None)
            for update in self._updates:
                update.done.set_exception(EngineBusyError("the engine has stopped"))

    def _obey(self) -> None:
        """With nothing else to do, wait for an order."""
        is_idle = self.paused or not (self._running or self._filling or self._waiting)
        if is_idle and not self._updates:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _stop(self) -> None:
        self._stopping = True

    def _pause(self, mode: PauseMode) -> None:
        if mode is PauseMode.ABORT:
            self._abort(None)
        elif mode is PauseMode.RETRACT:
            self._retract()
        self.paused = True

    def _resume(self) -> None:
        self.paused = False

    def _flush(self) -> None:
        if self._running or self._filling:
            raise EngineBusyError("requests are running; finish, retract or abort them first")
        self._cache.clear()

    def _apply_updates(self) -> None:
        is_idle = not (self._running or self._filling)
        while self._updates and (self.paused or is_idle):
            update = self._updates.popleft()
            if update.flush_cache and not is_idle:
                update.done.set_exception(
                    EngineBusyError(
                        "requests hold KV of the old weights: pause with abort or retract, or set flush_cache to false"
                    )
                )
                continue
            update.model.config = self._model.config
            self._model, self.model_path = update.model, update.path
            if (filling := self._filling) is not None and filling.reading is not None:
                filling.reading.restart()  # all of its logprobs are to be of the same weights
                self._filled = 0
            self.weight_version = update.version
            if update.flush_cache:
                self._cache.clear()
            update.done.set_result(None)

    def _abort(self, rid_prefix: str | None) -> None:
        def is_meant(job: EngineJob) -> bool:
            return rid_prefix is None or job.rid.startswith(rid_prefix)

        reason = {"type": "abort", "message": _ABORTED}
        for job in [job for job in self._waiting if is_meant(job)]:
            self._waiting.remove(job)
            job.end(reason)
        if self._filling is not None and is_meant(self._filling):
            job, self._filling = self._filling, None
            job.end(reason)
        for job in [job for job in self._running if is_meant(job)]:
            self._leave(job)
            job.end(reason)
        self._set_budget()

    def _retract(self) -> None:
        retracted = [*self._running, *([self._filling] if self._filling else [])]
        self._running.clear()
        self._filling = None
        for job in retracted:
            job.retractions += 1
            job.stored_tokens = 0
        self._waiting.extendleft(reversed(retracted))
        self._set_budget()

    def _set_budget(self) -> None:
        admitted = [*self._running, *([self._filling] if self._filling else [])]
        self.stats.reserved_tokens = sum(job.largest_length for job in admitted)
        self._cache.resize(self.options.kv_tokens - self.stats.reserved_tokens)

    def _admit(self) -> EngineJob | None:
        if not self._waiting or self._updates or len(self._running) >= self.options.max_running:
            return None
        if self.stats.reserved_tokens + self._waiting[0].largest_length > self.options.kv_tokens:
            return None
        job = self._waiting.popleft()
        self._filling = job
        slot, self._filled = self.options.max_running, 0
        # At least one token must be run, because only that gives logits.
        matched, pieces = self._cache.match(job.cache_ids[: job.cacheable])
        if job.reading is not None and not job.reading.is_whole:
            job.reading.restart()
        for keys, values in pieces:
            self._store.write(slot, self._filled, keys, values)
            self._filled += keys.shape[2]
        if not job.output:
            job.cached_tokens = matched
        self.stats.prompt_tokens += job.length
        self.stats.cached_tokens += matched
        job.stored_tokens = matched
        self._set_budget()
        return job

    def _prefill(self) -> None:
        """Process at most a chunk of prompt tokens; prompts that are complete join the batch."""
        left = self.options.prefill_chunk
        slot = self.options.max_running
        while left > 0 and (job := self._filling or self._admit()) is not None:
            tokens = job.tokens
            stop = min(len(tokens), self._filled + left)
            ids = np.array([tokens[self._filled : stop]])
            places, reading = np.arange(self._filled, stop)[None], job.reading
            if reading is None or reading.is_whole:
                logits = self._model.forward(ids, places, self._store, slot)
            else:
                every = self._model.forward(ids, places, self._store, slot, every_position=True)
                reading.read(every[0], self._filled)
                logits = every[:, -1]
            left -= stop - self._filled
            self._filled = stop
            if stop == len(tokens):
                self._filling = None
                self._store.move(slot, len(self._running), stop)
                self._running.append(job)
                self._remember(job, stop)
                self._take_tokens([job], logits)

    def _decode_step(self) -> None:
        if not self._running:
            return
        ids = np.array([[job.output[-1]] for job in self._running])
        positions = np.array([[job.length - 1] for job in self._running])
        self._take_tokens(list(self._running), self._model.forward(ids, positions, self._store, 0))

    def _take_tokens(self, jobs: list[EngineJob], logits: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        tokens, logprobs = sample(logits, [job.sampler for job in jobs], [job.length for job in jobs])
        self.stats.generated_tokens += len(jobs)
        sampled = zip(jobs, tokens.tolist(), logprobs.tolist(), strict=True)
        for row, (job, token, logprob) in enumerate(sampled):
            likely = likeliest(logits[row], job.sampler, job.likely) if job.likely else None
            job.append(token, logprob, self.weight_version, likely)
            finish = self._finish_reason(job)
            if finish is not None:
                self._leave(job)
                self._set_budget()
                job.end(finish)
            elif job.streams:
                job.notify()

    def _finish_reason(self, job: EngineJob) -> dict[str, object] | None:
        token = job.output[-1]
        if token in job.stop_ids:
            return {"type": "stop", "matched": token}
        if job.stop_texts and self._decode is not None:
            # A token may be a single byte.
            longest = max(len(text.encode("utf-8", "surrogatepass")) for text in job.stop_texts)
            tail = self._decode(job.output[-longest - 1 :])
            matched = next((text for text in job.stop_texts if text in tail), None)
            if matched is not None:
                return {"type": "stop", "matched": matched}
        if len(job.output) >= job.max_new_tokens:
            return {"type": "length", "length": len(job.output)}
        return None

    def _leave(self, job: EngineJob) -> None:
        """Remove a job from the batch, keep its KV in the cache, and close the gap."""
        slot = self._running.index(job)
        self._remember(job, job.length - 1, slot)  # the last token was never run
        last = self._running.pop()
        if last is not job:
            self._running[slot] = last
            self._store.move(len(self._running), slot, last.length)

    def _remember(self, job: EngineJob, length: int, slot: int | None = None) -> None:
        slot = len(self._running) - 1 if slot is None else slot
        keys, values = self._store.read(slot, job.stored_tokens, length)
        self._cache.insert(job.cache_ids[:length], keys, values, start=job.stored_tokens)
        job.stored_tokens = length
