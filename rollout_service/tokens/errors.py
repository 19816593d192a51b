"""Errors of turning messages into token ids and back."""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar

from api_schemas.errors import Boundary
from rollout_service.base.errors import ServiceError


class TokenError(ServiceError):
    """The base of the family."""

    code: ClassVar[str] = "token_error"
    boundary: ClassVar[Boundary] = Boundary.TOKENS


class TokenizerNotFoundError(TokenError):
    """No tokenizer could be loaded from the given folder or hub name."""

    code = "tokenizer_not_found"
    status = HTTPStatus.UNPROCESSABLE_ENTITY


class UnknownRendererError(TokenError):
    """The chat format is not known, or cannot be told from the model's type."""

    code = "unknown_renderer"
    status = HTTPStatus.UNPROCESSABLE_ENTITY


class RendererMismatchError(TokenError):
    """The tokenizer and the chat format do not fit together, or an option of the format is wrong."""

    code = "renderer_mismatch"
    status = HTTPStatus.UNPROCESSABLE_ENTITY


class RenderError(TokenError):
    """The messages cannot be put into the chat format."""

    code = "render_failed"
    status = HTTPStatus.UNPROCESSABLE_ENTITY


class ConversationStateError(TokenError):
    """A prompt without a message to answer, or a turn without a prompt."""

    code = "conversation_state"


class RecordError(TokenError):
    """An engine's answer lacks something, such as the log-probability of a token; nothing is made up for it."""

    code = "unusable_engine_output"
    retryable = True


class InvariantError(TokenError):
    """A trajectory breaks an invariant; `segment` and `index` say where."""

    code = "trajectory_invariant"

    def __init__(self, message: str, *, segment: int, index: int | None = None) -> None:
        place = f"segment {segment}" if index is None else f"segment {segment}, token {index}"
        super().__init__(
            f"{place}: {message}",
            hint="This is a defect of whoever built the trajectory; do not train on it.",
            context={"segment": segment, "index": index},
        )
        self.segment = segment
        self.index = index
