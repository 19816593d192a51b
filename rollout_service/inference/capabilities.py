"""What an engine must be able to do before it may serve: found out by asking it for one token."""

import anyio

from rollout_service.inference.contract import Backend, GenerateRequest, ModelInfo, Sampling, new_request_id
from rollout_service.inference.errors import BackendProtocolError, BackendUnreachable

_PROBE_PROMPT = (0,)  # the one id that every vocabulary has


async def check_backend(backend: Backend, *, seconds: float) -> ModelInfo:
    """What `backend` serves, once it has sampled one token and told everything that the service needs
    about it.

    Raises:
        BackendUnreachable: it does not answer in `seconds`.
        BackendProtocolError: its answers lack something; the message names it.
    """
    request = GenerateRequest(new_request_id(), _PROBE_PROMPT, Sampling(max_new_tokens=1, temperature=0.0))
    with anyio.move_on_after(seconds):
        info = await backend.model_info()
        if info.context_length < 1:
            raise BackendProtocolError("states no context length", backend_id=backend.id)
        await backend.generate(request)
        return info
    raise BackendUnreachable(
        f"did not sample a token in {seconds:g} s",
        hint="Is the engine still loading, or paused? POST /continue_generation to it ends a pause",
        backend_id=backend.id,
    )
