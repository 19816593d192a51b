"""Checks the features of an engine before it may serve, and that it can use new weights, by asking it for one token."""

from dataclasses import replace

import anyio

from rollout_service.engines.contract import (
    Backend,
    GenerateRequest,
    ModelInfo,
    RequestedExtras,
    SamplingOptions,
    new_request_id,
)
from rollout_service.engines.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    ExtraUnsupported,
    InferenceError,
)
from rollout_service.engines.kinds.token_extras import ExtraKind, unsupported, wanted

TRIAL_SECONDS = 10.0
"""How long a token with new weights is waited for: weights that cannot be sampled with fail at once."""

_PROBE_PROMPT = (0,)  # the one id that every vocabulary has


async def check_backend(backend: Backend, *, seconds: float) -> ModelInfo:
    """Sample one token, and return the backend's model with the extras that it supports.

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


async def try_weights(backend: Backend, version: int, source: str = "") -> None:
    """Sample one token with weights that a backend was given; one that is too busy to answer soon passes.

    Raises:
        InferenceError: The backend cannot sample with them; the message names the version and the source.
    """
    try:
        with anyio.move_on_after(TRIAL_SECONDS):
            await backend.generate(_probe(set()))
    except InferenceError as error:
        where = f" from {source}" if source else ""
        raise type(error)(
            f"cannot sample with version {version} of the weights{where}: {error}",
            hint="The weights may not be finite: look for NaN in the checkpoint and in the trainer's loss. Then load a "
            "later version, or this one again with `force`.",
            context=error.context,
        ) from error


def refuse_missing_extras(extras: RequestedExtras, info: ModelInfo, backend_id: str) -> None:
    """Refuse a request for extras that the backend did not return when it was checked.

    Raises:
        ExtraUnsupported: The backend did not return one of the extras; the message names the first.
    """
    missing = wanted(extras) - info.extras
    if missing:
        raise unsupported(ExtraKind(min(missing)), backend_id=backend_id)


async def _sample(backend: Backend, info: ModelInfo) -> frozenset[str]:
    """Sample a token with every extra that the engine may support; return those that came."""
    kinds = {ExtraKind.TOP_LOGPROBS, ExtraKind.PROMPT_LOGPROBS}
    if info.routing_shape is not None:
        kinds.add(ExtraKind.ROUTED_EXPERTS)
    while True:
        try:
            await backend.generate(_probe(kinds))
        except ExtraUnsupported as error:
            kinds.remove(ExtraKind(error.context["export"]))
        except BackendRejected:
            if not kinds:
                raise
            kinds.clear()  # it does not know such fields
        else:
            return frozenset(kind.value for kind in kinds)


def _probe(kinds: set[ExtraKind]) -> GenerateRequest:
    extras = RequestedExtras(
        top_logprobs=int(ExtraKind.TOP_LOGPROBS in kinds),
        prompt_logprobs_from=0 if ExtraKind.PROMPT_LOGPROBS in kinds else None,
        routed_experts_from=0 if ExtraKind.ROUTED_EXPERTS in kinds else None,
    )
    sampling = SamplingOptions(max_new_tokens=1, temperature=0.0)
    return GenerateRequest(new_request_id(), _PROBE_PROMPT, sampling, extras)
