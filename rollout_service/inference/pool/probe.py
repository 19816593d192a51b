"""What an engine must be able to do before it may serve, and what else it can: found out by asking it for one token."""

from dataclasses import replace

import anyio

from rollout_service.inference.contract import (
    Backend,
    GenerateRequest,
    ModelInfo,
    RequestedExtras,
    SamplingOptions,
    new_request_id,
)
from rollout_service.inference.engines.token_extras import ExtraKind, unsupported, wanted
from rollout_service.inference.errors import (
    BackendProtocolError,
    BackendRejected,
    BackendUnreachable,
    ExtraUnsupported,
)

_PROBE_PROMPT = (0,)  # the one id that every vocabulary has
_HINTS = {
    ExtraKind.TOP_LOGPROBS: "Leave exports.top_logprobs out, or use SGLang or vLLM",
    ExtraKind.PROMPT_LOGPROBS: "Leave exports.prompt_logprobs out, or use SGLang or vLLM",
    ExtraKind.ROUTED_EXPERTS: "Leave exports.routed_experts out, or serve a mixture of experts with the engine's "
    "--enable-return-routed-experts, from a folder that this service can read, and register it again",
}


async def check_backend(backend: Backend, *, seconds: float) -> ModelInfo:
    """What `backend` serves, once it has sampled one token and told everything that the service needs
    about it.

    Raises:
        BackendUnreachable: it does not answer in `seconds`.
        BackendProtocolError: its answers lack something; the message names it.
    """
    with anyio.move_on_after(seconds):
        info = await backend.model_info()
        if info.context_length < 1:
            raise BackendProtocolError("states no context length", backend_id=backend.id)
        return replace(info, extras=await _sample(backend, info))
    raise BackendUnreachable(
        f"did not sample a token in {seconds:g} s",
        hint="Is the engine still loading, or paused? A pause ends with its own order to resume",
        backend_id=backend.id,
    )


def refuse_missing_extras(extras: RequestedExtras, info: ModelInfo, backend_id: str) -> None:
    """Refuse what a backend was found not to give.

    Raises:
        ExtraUnsupported: of the first thing that it does not give.
    """
    missing = wanted(extras) - info.extras
    if missing:
        kind = min(missing)
        raise unsupported(ExtraKind(kind), hint=_HINTS[ExtraKind(kind)], backend_id=backend_id)


async def _sample(backend: Backend, info: ModelInfo) -> frozenset[str]:
    """Sample a token with everything else that an engine may give; return what came."""
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
            kinds.clear()  # it does not know such requests
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
