"""Errors of a client's call, in addition to the service's own. Each dialect tells them in the form of its API."""

from __future__ import annotations

from http import HTTPStatus

from rollout_service.base.errors import InvalidFieldError, RequestError


class RefusedParameterError(InvalidFieldError):
    """A parameter that cannot be honored, and whose absence would change the answer's meaning."""

    code = "refused_parameter"
    status = HTTPStatus.BAD_REQUEST


class UnsupportedContentError(InvalidFieldError):
    """A message holds an image, a sound or a file, which the policy cannot read."""

    code = "unsupported_content"
    status = HTTPStatus.BAD_REQUEST


class ContextOverflowError(RequestError):
    """The prompt does not fit the model's context. Clients that know this error shorten their history."""

    code = "context_overflow"
    status = HTTPStatus.BAD_REQUEST

    def __init__(self, prompt_tokens: int, context_length: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, but the model's context holds {context_length}",
            hint="Shorten the conversation.",
            context={"prompt_tokens": prompt_tokens, "context_length": context_length},
        )
        self.prompt_tokens = prompt_tokens
        self.context_length = context_length


class RolloutEndedError(RequestError):
    """The key was valid once; its rollout has ended."""

    code = "rollout_ended"
    status = HTTPStatus.GONE

    def __init__(
        self,
        message: str = "the rollout of this key has ended",
        *,
        hint: str = "End the program, or begin another rollout.",
    ) -> None:
        super().__init__(message, hint=hint)


class UnknownModelError(RequestError):
    """The program asks for another model than the policy, and the settings refuse that."""

    code = "unknown_model"
    status = HTTPStatus.NOT_FOUND

    def __init__(self, model: str, known: str) -> None:
        super().__init__(
            f"there is no model {model!r}",
            hint=f"Ask for {known!r}, or set `unknown_model` in `[gateway]` to `serve`.",
        )
