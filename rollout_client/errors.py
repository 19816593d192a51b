"""The errors of the client.

ClientError
 |- UnreachableError       no response within the patience of this client
 |- AddressError           the server's URL is not one of HTTP
 |- KeyFormatError         the key has characters that no key has
 |- ProxySettingsError     the proxy that the environment names cannot be used
 |- CaFileError            the file of certificates to trust cannot be used
 |- ProtocolError          a response that is not one of this API
 `- ProblemError           the server refused, or an engine (502), for good; `.problem` is the problem document
     |- InvalidRequestError    400, 413, 422
     |- UnauthorizedError      401, 403
     |- NotFoundError          404
     |- ConflictError          409
     |- GoneError              410
     |- OrderError             engines did not carry out an order; `.outcome` has the answer of each
     |   `- WeightsError           ... to load weights
     `- UnavailableError       408, 429, 504, and 502 and 503 if they may pass
"""

from __future__ import annotations

from typing import Any

from rollout_client import _wire as wire


class ClientError(Exception):
    """The base class of the client's errors."""


class UnreachableError(ClientError):
    """No server answered within the patience of this client."""


class AddressError(ClientError):
    """The server's URL is not one of HTTP, so no server can ever answer."""


class KeyFormatError(ClientError):
    """The key has characters that no key has, such as a line break of its file, so it cannot be sent."""


class ProxySettingsError(ClientError):
    """The proxy that the environment names for the server cannot be used."""


class CaFileError(ClientError):
    """The file of certificates to trust is missing, cannot be read, or has none."""


class ProtocolError(ClientError):
    """The response is not one of this API: it came from another program, a proxy, or another version."""


class ProblemError(ClientError):
    """The server refused the request."""

    def __init__(self, problem: wire.Problem) -> None:
        super().__init__(f"{problem.title}: {problem.detail}")
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem,), vars(self)  # trainers pass errors between processes


class InvalidRequestError(ProblemError):
    """The request is invalid; `problem.errors` names the fields."""


class UnauthorizedError(ProblemError):
    """The key is missing or wrong."""


class NotFoundError(ProblemError):
    """The requested resource does not exist."""


class ConflictError(ProblemError):
    """The request contradicts the present state, as when an id is used with another body."""


class GoneError(ProblemError):
    """The run is over and has no more batches, or the session has ended."""


class OrderError(ProblemError):
    """Engines did not carry out an order to all engines of a pool; `outcome` has the answer of each."""

    def __init__(self, problem: wire.Problem) -> None:
        super().__init__(problem)
        self.outcome = wire.PoolOutcome.model_validate(problem.context["outcome"])


class WeightsError(OrderError):
    """At least one engine did not load the weights.

    If `outcome.changed` is true, some engines have them: these serve the new version, and the others are out of service
    until they have it too. If it is false, the pool serves the same weights as before.
    """


class UnavailableError(ProblemError):
    """The server cannot take the request now, but may later."""

    retry_after = 0.0
    """The seconds that the server asks to wait before the next request."""
