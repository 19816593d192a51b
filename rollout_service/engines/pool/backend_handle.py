"""A backend in a pool: its state, its open calls, its record so far, and the checks before it may serve."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import anyio
import structlog

from api_schemas.inference import BackendState, BackendView, is_frozen
from rollout_service.base.signals import ChangeSignal
from rollout_service.engines.contract import (
    Backend,
    GenerateRequest,
    Generation,
    ModelInfo,
    RequestedExtras,
    SamplingOptions,
    TokenChunk,
    TokenSink,
    new_request_id,
)
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    ExtraUnsupported,
    InferenceError,
)
from rollout_service.engines.kinds.checks import ExtraKind, unsupported, wanted
from rollout_service.engines.kinds.http_backend import HttpBackend
from rollout_service.engines.pool.locality import is_local


class VersionWatch:
    """Counts the changes of version in one pool, as its backends report them and as their answers say.

    A frozen pool takes no weights from this service, so any change there was made at an engine.
    """

    def __init__(self, pool: str) -> None:
        self.changes = 0
        """How often a backend had another version than before, or a new one another than the pool."""
        self._pool = pool
        self._last: int | None = None
        self._seen: dict[str, int] = {}

    def saw(self, backend_id: str, version: int) -> None:
        before = self._seen.get(backend_id, self._last)
        self._seen[backend_id] = self._last = version
        if before in (None, version):
            return
        self.changes += 1
        if is_frozen(self._pool):
            log.warning(
                "a frozen pool has another version",
                pool=self._pool,
                backend_id=backend_id,
                version=version,
                before=before,
                hint="Find out who gave the engine weights; results before and after are of two policies.",
            )


log = structlog.get_logger(__name__)

OTHER_VERSION_HINT = (
    "Find out who gave the engine weights: only this service may. Load the policy's newest version with "
    "POST /v1/weights, with `force` if the pool has it already."
)
_SMALLEST_SHARE = 0.1
_CLOSE_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class BackendHandle:
    """One backend of a pool; `in_flight` is decremented however a call ends."""

    backend: Backend
    kind: str
    info: ModelInfo
    slow_start: float
    """Seconds over which a backend that has joined grows to its fair share."""
    versions: VersionWatch
    external_version: Callable[[], int | None]
    """Returns the version of weights that the trainer loads itself, which engines need not report."""
    clock: Callable[[], float] = time.monotonic
    max_in_flight: int | None = None
    traces: bool = False
    """Whether its requests carry a `traceparent` header."""
    is_local: bool = False
    id: str = field(init=False)
    state: BackendState = BackendState.READY
    in_flight: int = 0
    queued: int | None = None
    """The requests in its own queue, by its last report."""
    served: int = 0
    chunks: int = 0
    failures: int = 0
    last_error: str | None = None
    failed_at: datetime | None = None
    """When a call or probe failed last."""
    tried_version: int | None = None
    """The weights that a token was last sampled with to try them."""
    sampled_version: int | None = None
    """The version of its newest tokens, if it was given another."""
    bad_in_a_row: int = 0
    """Requests that failed since one was answered."""
    bad_probes: int = 0
    """Probes that failed since the last good one."""
    good_probes: int = 0
    """Good probes since anything failed."""
    check: anyio.Event | None = None
    """Set once the check after a failed request has ended; None while there is none."""
    watch: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _since: float = 0.0
    _calls: dict[anyio.CancelScope, float] = field(default_factory=dict)
    """The open calls' start times."""
    _why_dropped: str = "was taken out of service during the request"
    _call_ended: ChangeSignal = field(default_factory=ChangeSignal)

    def __post_init__(self) -> None:
        self._since = self.clock()
        self.id = self.backend.id
        self.is_local = is_local(self.backend.url)

    @property
    def share(self) -> float:
        """The fraction of its fair share that it may take now."""
        if self.slow_start <= 0:
            return 1.0
        return min(1.0, max(_SMALLEST_SHARE, (self.clock() - self._since) / self.slow_start))

    @property
    def has_room(self) -> bool:
        return self.max_in_flight is None or self.in_flight < self.max_in_flight

    async def generate(self, request: GenerateRequest, on_tokens: TokenSink | None = None) -> Generation:
        if missing := wanted(request.extras) - self.info.extras:
            raise unsupported(ExtraKind(min(missing)), backend_id=self.id)
        self.in_flight += 1
        scope = anyio.CancelScope()
        self._calls[scope] = self.clock()
        external = self.external_version()
        try:
            with scope:
                part = await self.backend.generate(request, on_tokens and self._counting(on_tokens, external))
                if external is not None:
                    part = replace(part, versions=[external] * len(part.output_ids))
                self.served += 1
                self.bad_in_a_row = 0
                if part.versions:
                    self.versions.saw(self.id, part.versions[-1])
                return part
        finally:
            self.in_flight -= 1
            del self._calls[scope]
            self._call_ended.notify()
        raise BackendUnreachable(self._why_dropped, backend_id=self.id)

    def _counting(self, on_tokens: TokenSink, external: int | None) -> TokenSink:
        """Count the chunks, and give their tokens the version `external` if there is one."""

        def count(chunk: TokenChunk) -> None:
            self.chunks += 1
            on_tokens(chunk if external is None else replace(chunk, versions=[external] * len(chunk.ids)))

        return count

    def has_weights(self, version: int) -> None:
        self.info = replace(self.info, weight_version=version)
        self.sampled_version = None
        if isinstance(self.backend, HttpBackend):  # another service, or the trainer, may have loaded them
            self.backend.has_weights(version)

    def sampled_with(self, version: int) -> None:
        """Note the version of the newest tokens; warn once of each that the backend was not given."""
        other = None if version == self.info.weight_version else version
        if other not in (None, self.sampled_version):
            log.warning(
                "an engine samples with another version",
                backend_id=self.id,
                version=other,
                given=self.info.weight_version,
                hint=OTHER_VERSION_HINT,
            )
        self.sampled_version = other

    def record_failure(self, error: BaseException) -> None:
        self.failures += 1
        self.good_probes = 0
        self.last_error = str(error) or type(error).__name__
        self.failed_at = datetime.now(UTC)

    def typed(self, error: Exception) -> InferenceError:
        """Return the error, or one that names the engine's kind if it is a defect of that."""
        if isinstance(error, InferenceError):
            return error
        why = f"its kind cannot read its answer: {type(error).__name__}: {error}"
        return BackendProtocolError(why, hint="Correct the plug-in.", backend_id=self.id)

    def take_out(self) -> None:
        """Give it no new requests; the open ones go elsewhere."""
        if self.state is BackendState.READY:
            self.state = BackendState.FAILED
        self.good_probes = 0
        self.drop_calls("was taken out of service during the request")

    def drop_calls(self, why: str, *, older_than: float = 0.0) -> None:
        """End the calls open for `older_than` seconds; the pool then repeats them elsewhere."""
        self._why_dropped = why
        latest = self.clock() - older_than
        for scope, since in list(self._calls.items()):
            if since <= latest:
                scope.cancel()

    async def wait_until_idle(self) -> None:
        while self.in_flight:
            await self._call_ended.wait()

    async def close(self) -> None:
        """End the open calls, which aborts them in the engine, and close the connections."""
        self.watch.cancel()
        self.take_out()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(_CLOSE_SECONDS):
                await self.wait_until_idle()
            await self.backend.close()

    def bring_back(self, info: ModelInfo, *, is_tried: bool) -> None:
        """Put it into service, with a small share at first; weights that are not tried yet are at the next resume."""
        self.info = info
        self.has_weights(info.weight_version)
        self.tried_version = info.weight_version if is_tried else None
        self.state = BackendState.READY
        self.bad_in_a_row, self.bad_probes, self.last_error = 0, 0, None
        self._since = self.clock()
        self.versions.saw(self.id, info.weight_version)

    def view(self, pool: str, *, paused: bool) -> BackendView:
        is_paused = paused and self.state is BackendState.READY
        return BackendView(
            backend_id=self.id,
            url=self.backend.url,
            pool=pool,
            kind=self.kind,
            state=BackendState.PAUSED if is_paused else self.state,
            model_path=self.info.model_path,
            tokenizer_path=self.info.tokenizer_path,
            weight_version=self.info.weight_version,
            sampled_version=self.sampled_version,
            context_length=self.info.context_length,
            exports=sorted(self.info.extras),
            in_flight=self.in_flight,
            queued=self.queued,
            served=self.served,
            failures=self.failures,
            last_error=self.last_error,
            failed_at=self.failed_at,
        )


TRIAL_SECONDS = 10.0
"""Long enough, since weights that cannot be sampled with fail at once."""

_AGAIN_SECONDS = 0.1
_PROBE_PROMPT = (0,)  # the one id that every vocabulary has


async def check_backend(backend: Backend, *, seconds: float) -> ModelInfo:
    """Sample one token with each extra that the model may have, and return the model with those that came.

    Raises:
        BackendUnreachable: The backend does not answer within `seconds`.
        BackendProtocolError: The backend's answers lack something required; the message names it.
    """
    with anyio.move_on_after(seconds):
        info = await backend.model_info()
        if info.context_length < 1:
            raise BackendProtocolError("does not state its context length", backend_id=backend.id)
        return replace(info, extras=await _sample(backend, info))
    raise BackendUnreachable(
        f"did not sample a token in {seconds:g} s",
        hint="Wait until the engine has loaded its model, and resume it if it is paused.",
        backend_id=backend.id,
    )


async def sample_token(backend: Backend) -> None:
    await backend.generate(_probe(set()))


async def try_weights(backend: Backend, version: int, source: str) -> None:
    """Sample one token; a backend that is too busy to answer soon passes.

    Raises:
        InferenceError: The backend cannot sample with them; the message names the version and the source.
    """
    try:
        with anyio.move_on_after(TRIAL_SECONDS):
            await sample_token(backend)
    except InferenceError as error:
        where = f" from {source}" if source else ""
        raise type(error)(
            f"cannot sample with version {version} of the weights{where}: {error}",
            hint="The weights may not be finite: look for NaN in the checkpoint and in the trainer's loss. Then load a "
            "later version, or this one again with `force`.",
            context=error.context,
        ) from error


async def _sample(backend: Backend, info: ModelInfo) -> frozenset[str]:
    kinds = {ExtraKind.TOP_LOGPROBS, ExtraKind.PROMPT_LOGPROBS}
    if info.routing_shape is not None:
        kinds.add(ExtraKind.ROUTED_EXPERTS)
    while True:
        try:
            answer = await backend.generate(_probe(kinds))
        except ExtraUnsupported as error:
            kinds.remove(ExtraKind(error.context["export"]))
        except BackendRejected:
            if not kinds:
                raise
            kinds.clear()  # it does not know such fields
        else:
            if answer.output_ids:
                return frozenset(kind.value for kind in kinds)
            await anyio.sleep(_AGAIN_SECONDS)  # an abort of all requests, which tells nothing


def _probe(kinds: set[ExtraKind]) -> GenerateRequest:
    extras = RequestedExtras(
        top_logprobs=int(ExtraKind.TOP_LOGPROBS in kinds),
        prompt_logprobs_from=0 if ExtraKind.PROMPT_LOGPROBS in kinds else None,
        routed_experts_from=0 if ExtraKind.ROUTED_EXPERTS in kinds else None,
    )
    sampling = SamplingOptions(max_new_tokens=1, temperature=0.0)
    return GenerateRequest(new_request_id(), _PROBE_PROMPT, sampling, extras)
