"""The errors between this service and an inference engine.

Answers are never repaired: tokens and logprobs are the engine's, or there are none.
"""

# ruff: noqa: N818 - named for what happened, as httpx does; the family ends in Error.

from typing import Any, ClassVar

from api_schemas.errors import Boundary
from rollout_service.base.errors import ServiceError

LONGEST_MESSAGE = 2_000


class InferenceError(ServiceError):
    """The base class; `backend_id` names the backend at fault, if any."""

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
        if len(message) > LONGEST_MESSAGE:  # the message may quote an engine's answer
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
    """The engine does not return the top-k logprobs, prompt logprobs or routed experts asked for."""

    code = "export_unsupported"


class SchemaRefused(BackendRejected):
    """The engine cannot make its text match the JSON schema, or does not constrain its samples."""

    code = "json_schema_refused"
    status = 422


class BackendProtocolError(InferenceError):
    """The engine's answer cannot be trusted; the whole answer is dropped."""

    code = "backend_protocol_error"


class NoBackendError(InferenceError):
    """The pool has no backend in service."""

    code = "no_backend"
    status = 503
    retryable = True


class UnknownPool(InferenceError):
    """An order is for a pool that no backend was registered in, although others have some."""

    code = "unknown_pool"
    status = 404


class UnknownBackend(InferenceError):
    """No backend with that id is registered."""

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
    """A command about weights contradicts the pool's state: an older version, or an incomplete group."""

    code = "weights_conflict"
    status = 409


class PoolFrozen(InferenceError):
    """The pool is frozen: its engines keep the weights that they were started with."""

    code = "pool_frozen"
    status = 409


class OrderFailed(InferenceError):
    """Backends failed a command to their pool; `context["outcome"]` has every answer."""

    code = "order_failed"


class WeightsRefused(OrderFailed):
    """Every backend refused the weights, such as a folder that does not exist, and keeps its own."""

    code = "weights_refused"
    status = 422


class WeightsNotLoaded(OrderFailed):
    """No backend has the weights, and not all refused them: some did not answer, or failed during the load."""

    code = "weights_not_loaded"
    retryable = True


class WeightsUnusable(OrderFailed):
    """Backends have the weights, but none can sample with them; all are out of service."""

    code = "weights_unusable"
    status = 422


class WeightsPartlyLoaded(OrderFailed):
    """Some backends have the weights, which are the pool's now; those that failed are out of service."""

    code = "weights_partly_loaded"
    status = 424
