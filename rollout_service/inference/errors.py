"""What can go wrong between this service and an inference engine.

InferenceError
├── BackendUnreachable      no answer, a broken connection, or a 5xx: the engine did not serve the request
├── BackendRejected         a 4xx: the engine refused this request and would refuse it again
│   ├── PromptTooLong       ... because the prompt and its budget do not fit the context
│   └── ExtraUnsupported   ... because it does not give what was asked for beside ids and logprobs
├── BackendProtocolError    an answer that cannot be trusted: missing logprobs, wrong counts, no JSON
├── NoBackendError          the pool has nothing that could serve the request
├── UnknownBackend          no backend of that id is registered
├── GenerationTimeout       the request was served, but not in time
│   └── PoolPaused          ... or was held by a pause for longer than allowed
├── WeightsConflict         the weights are not those that the pool can be given next
└── OrderFailed             backends did not carry out an order to their pool; the context has every answer
    ├── WeightsRefused      ... and all refused the weights that they were given
    ├── WeightsNotLoaded    ... and none has the weights
    └── WeightsPartlyLoaded ... and only some have the weights

Nothing here is ever repaired: tokens and logprobs are the engine's or there are none.
"""

# ruff: noqa: N818 - named for what happened, as httpx does; the family ends in Error.

from typing import Any, ClassVar

from api_schemas.errors import Boundary
from rollout_service.errors import ServiceError

LONGEST_MESSAGE = 2_000
"""Characters of a message, which may quote an engine's answer."""


class InferenceError(ServiceError):
    """The base of the family; `backend_id` names the backend where one is at fault."""

    code: ClassVar[str] = "inference_error"
    boundary: ClassVar[Boundary] = Boundary.INFERENCE
    status: ClassVar[int] = 502

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        backend_id: str = "",
        context: dict[str, Any] | None = None,
    ) -> None:
        self.backend_id = backend_id
        if len(message) > LONGEST_MESSAGE:  # it may quote what an engine answered
            message = f"{message[:LONGEST_MESSAGE]}..."
        text = f"backend {backend_id}: {message}" if backend_id else message
        super().__init__(text, hint=hint, context=context)


class BackendUnreachable(InferenceError):
    """The engine gave no answer, broke the connection, or failed with a 5xx."""

    code = "backend_unreachable"
    retryable = True


class BackendRejected(InferenceError):
    """The engine refused the request; sending it again gives the same answer."""

    code = "backend_rejected"


class PromptTooLong(BackendRejected):
    """Prompt and token budget together do not fit the engine's context."""

    code = "prompt_too_long"


class ExtraUnsupported(BackendRejected):
    """The engine does not give top-k logprobs, prompt logprobs or routed experts, which were asked for."""

    code = "export_unsupported"


class BackendProtocolError(InferenceError):
    """The engine answered something that the service cannot vouch for; the answer is dropped whole."""

    code = "backend_protocol_error"


class NoBackendError(InferenceError):
    """No backend of the pool is registered and in service."""

    code = "no_backend"
    status = 503
    retryable = True


class UnknownBackend(InferenceError):
    """No backend of that id is registered."""

    code = "unknown_backend"
    status = 404


class GenerationTimeout(InferenceError):
    """The request did not finish, or was held by a pause, for longer than allowed."""

    code = "generation_timeout"
    status = 504
    retryable = True


class PoolPaused(GenerationTimeout):
    """A pause held the request for longer than allowed; once the pool is resumed it can be sent again."""

    code = "pool_paused"
    status = 503


class WeightsConflict(InferenceError):
    """An order about weights contradicts what the pool has: an older version, or a group that is not whole."""

    code = "weights_conflict"
    status = 409


class OrderFailed(InferenceError):
    """Backends did not carry out an order that went to all of their pool; `context["outcome"]` has every answer."""

    code = "order_failed"


class WeightsRefused(OrderFailed):
    """Every backend refused the weights, as with a folder that does not exist, and keeps those that it had."""

    code = "weights_refused"
    status = 422


class WeightsNotLoaded(OrderFailed):
    """No backend has the weights, and not all refused them: some did not answer, or failed while they loaded."""

    code = "weights_not_loaded"
    retryable = True


class WeightsPartlyLoaded(OrderFailed):
    """Some backends have the weights, which are the pool's now; those that failed are out of service."""

    code = "weights_partly_loaded"
    status = 424
