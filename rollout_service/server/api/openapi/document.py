"""Builds the OpenAPI document from the routes.

Guarantees: every error that a route can answer with is declared, as `application/problem+json` with the schema
`Problem`. Errors that all routes share (keys, limits, an unavailable store) are listed here once and added to each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api_schemas.errors import Problem
from rollout_service.base.errors import (
    DefectError,
    ForbiddenError,
    HeadTooLargeError,
    InvalidFieldError,
    MalformedBodyError,
    MalformedRequestError,
    MediaTypeError,
    MisdirectedError,
    RecordLostError,
    RequestTimeoutError,
    ServiceError,
    StoreError,
    TooLargeError,
    TooManyBytesError,
    UnauthorizedError,
    UnavailableError,
)
from rollout_service.server.api.middleware import PROBES
from rollout_service.server.api.openapi.examples import PROBLEM, REQUESTS, RESPONSES
from rollout_service.server.api.openapi.responses import add_error

Document = dict[str, Any]
Operation = dict[str, Any]

JSON = "application/json"
SCHEME = "bearer"
WITH_KEY: tuple[type[ServiceError], ...] = (UnauthorizedError, ForbiddenError)
"""Errors of routes that need a key."""
EVERYWHERE: tuple[type[ServiceError], ...] = (
    MalformedRequestError,
    RequestTimeoutError,
    MisdirectedError,
    InvalidFieldError,
    HeadTooLargeError,
    StoreError,
    UnavailableError,
    DefectError,
    RecordLostError,
)
"""Errors of every route but the probes."""
WITH_BODY: tuple[type[ServiceError], ...] = (
    MalformedBodyError,
    TooLargeError,
    TooManyBytesError,
    MediaTypeError,
)
"""Errors of routes that read a body."""

DESCRIPTION = """\
Runs agentic rollouts for any RL trainer: tasks go in, token-exact trajectories with rewards come out.

Every error is a [problem](https://www.rfc-editor.org/rfc/rfc9457): `code` names it for programs, `detail` says what
went wrong and what to do next, `errors` lists the paths of invalid fields, and `retryable` says whether the same
request may succeed later."""

TAGS = {
    "rollouts": "A rollout is one attempt at one task: submit it, wait for it, read its trajectory.",
    "runs": "A run keeps producing groups of rollouts for a trainer, which leases and acknowledges them in batches.",
    "inference": "The engines of each pool, and the weights that they serve.",
    "environments": "The environments that tasks can name, and the instances that ship with them.",
    "sandboxes": "Live sandboxes.",
    "sessions": "Live sessions: users' own agents are served, and what they do next trains the policy.",
    "nodes": "The nodes that share the store, and how much this one runs at once.",
    "overview": "The service at a glance, once or once a second.",
    "hangs": "What rollouts wait for now, and what is stuck, slow or held back.",
    "events": "What happens in the service, in order, as server-sent events.",
    "health": "Liveness and readiness probes, and metrics.",
    "ProRL Agent": "The ProRL Agent server's own routes, for trainers written for it.",
}


def build(app: FastAPI, *, keyed: bool, prefix: str = "") -> Document:
    """Return the document of an app; `keyed` says whether it requires a key, and `prefix` where a proxy has it."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        summary=app.summary,
        description=DESCRIPTION,
        routes=app.routes,
        servers=[{"url": prefix}] if prefix else None,
        tags=[{"name": name, "description": text} for name, text in TAGS.items()],
    )
    components = document.setdefault("components", {})
    components["schemas"] = _without_fastapis_errors(components.get("schemas", {})) | _problem_schemas()
    components["securitySchemes"] = {
        SCHEME: {"type": "http", "scheme": "bearer", "description": "One of the service's keys."}
    }
    document["security"] = [{SCHEME: []}] if keyed else [{}, {SCHEME: []}]
    for path, operation in _operations(document):
        _complete(operation, is_open=path in PROBES)
        _exemplify(operation)
    return document


def _operations(document: Document) -> Iterator[tuple[str, Operation]]:
    for path, item in document["paths"].items():
        for operation in item.values():
            yield path, operation


def _complete(operation: Operation, *, is_open: bool) -> None:
    """Add the errors and the security that the operation shares with others of its kind."""
    if is_open:
        operation["security"] = []
        return
    responses = operation["responses"]
    if JSON in responses.get("422", {}).get("content", {}):
        del responses["422"]  # FastAPI's own error, which this service never sends
    errors = [*WITH_KEY, *EVERYWHERE, *(WITH_BODY if "requestBody" in operation else ())]
    for error in errors:
        add_error(responses.setdefault(str(int(error.status)), {}), error)
    operation["responses"] = dict(sorted(responses.items()))


def _exemplify(operation: Operation) -> None:
    """Add the examples of the operation's body and responses."""
    name = operation["operationId"]
    if name in REQUESTS:
        operation["requestBody"]["content"][JSON]["example"] = REQUESTS[name]
    for status, value in RESPONSES.get(name, {}).items():
        operation["responses"][status]["content"][JSON]["example"] = value


def _without_fastapis_errors(schemas: dict[str, Any]) -> dict[str, Any]:
    return {name: schema for name, schema in schemas.items() if not name.endswith("ValidationError")}


def _problem_schemas() -> dict[str, Any]:
    schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
    return {**schema.pop("$defs"), "Problem": {**schema, "examples": [PROBLEM]}}
