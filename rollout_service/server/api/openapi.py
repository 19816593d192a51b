"""The OpenAPI document at `/openapi.json`, and Swagger UI at `/docs`.

Every error of a route is declared, as `application/problem+json` with the schema `Problem`. The page loads nothing from
another host, so it works offline. It needs no key, since it is the same for every user of this release; it sends the
key that is typed into it with each request.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

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
    NotFoundError,
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
from rollout_service.server.api.routes.support.route import add_error
from sandboxes.extras import extra_hint

ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",  # Swagger UI sets styles of single elements
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Rollout service</title>
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="icon" href="docs/favicon.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
START = """\
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  validatorUrl: null,
});
"""


def install(app: FastAPI, *, keyed: bool, prefix: str = "") -> None:
    """Add the document and its page to an app that has all its routes."""

    @cache
    def document() -> bytes:
        return json.dumps(build(app, keyed=keyed, prefix=prefix), ensure_ascii=False).encode()

    def openapi(_: Request) -> Response:  # not a coroutine: building takes a while, so it runs in a thread
        return Response(document(), media_type="application/json")

    app.add_route("/openapi.json", openapi, include_in_schema=False)
    app.add_route("/docs", _page, include_in_schema=False)
    app.add_route("/docs/start.js", _fixed(START.encode(), "text/javascript"), include_in_schema=False)
    for name, media_type in ASSETS.items():
        app.add_route(f"/docs/{name}", _asset(name, media_type), include_in_schema=False)


def _page(_: Request) -> Response:
    if find_spec("fastapi_offline") is None:
        raise NotFoundError(
            "the page needs the package fastapi-offline, which is not installed",
            hint=f"{extra_hint('docs')}. Or read /openapi.json.",
        )
    return HTMLResponse(PAGE, headers={"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"})


def _fixed(content: bytes, media_type: str) -> Callable[[Request], Response]:
    return lambda _: Response(content, media_type=media_type, headers={"X-Content-Type-Options": "nosniff"})


def _asset(name: str, media_type: str) -> Callable[[Request], Response]:
    @cache
    def content() -> bytes:
        return (files("fastapi_offline") / "static" / name).read_bytes()

    return lambda request: _fixed(content(), media_type)(request)


Document = dict[str, Any]
Operation = dict[str, Any]

JSON = "application/json"
SCHEME = "bearer"
WITH_KEY: tuple[type[ServiceError], ...] = (UnauthorizedError, ForbiddenError)
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
WITH_BODY: tuple[type[ServiceError], ...] = (
    MalformedBodyError,
    TooLargeError,
    TooManyBytesError,
    MediaTypeError,
)

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
    """Return the document of an app; `prefix` is the path at which a proxy has it."""
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
    schemas = components.get("schemas", {}).items()
    components["schemas"] = {
        name: schema
        for name, schema in schemas
        if not name.endswith("ValidationError")  # FastAPI's own errors
    } | _problem_schemas()
    components["securitySchemes"] = {
        SCHEME: {"type": "http", "scheme": "bearer", "description": "One of the service's keys."}
    }
    document["security"] = [{SCHEME: []}] if keyed else [{}, {SCHEME: []}]
    for path, item in document["paths"].items():
        for operation in item.values():
            _complete(operation, is_open=path in PROBES)
            _exemplify(operation)
    return document


def _complete(operation: Operation, *, is_open: bool) -> None:
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
    name = operation["operationId"]
    if name in REQUESTS:
        operation["requestBody"]["content"][JSON]["example"] = REQUESTS[name]
    for status, value in RESPONSES.get(name, {}).items():
        operation["responses"][status]["content"][JSON]["example"] = value


def _problem_schemas() -> dict[str, Any]:
    schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
    return {**schema.pop("$defs"), "Problem": {**schema, "examples": [PROBLEM]}}


# Examples of request and response bodies, by operation id. A service with the built-in environments accepts every
# request.

TASK = {"environment": "calc", "instance": {"question": "What is 6 * 7?", "answer": "42"}}

REQUESTS: dict[str, Any] = {
    "submit_rollout": {
        "rollout_id": "first-42",
        "task": TASK,
        "limits": {"max_turns": 8},
        "metadata": {"epoch": 1},
    },
    "end_rollout": {"reward": 1.0, "reward_parts": {"tests": 1.0}, "attempt": 1},
    "abort_rollouts": {"rollout_ids": ["first-42"]},
    "create_run": {
        "run_id": "calc-1",
        "source": {"kind": "inline", "tasks": [TASK]},
        "group_size": 4,
        "batch_size": 1,
        "max_staleness": 2,
        "advantages": "group_norm",
    },
    "patch_run": {"version": 7},
    "append_tasks": {"tasks": [TASK], "offset": 0, "close": True},
    "rescore_run": {"replay": "needed"},
    "rescore_rollouts": {
        "environment": "calc",
        "rollouts": [
            {
                "request": {"task": TASK},
                "rollout": {
                    "rollout_id": "first-42",
                    "state": "failed",
                    "task": TASK,
                    "pool": "policy",
                    "created_at": "2026-01-01T00:00:00Z",
                },
            }
        ],
    },
    "open_session": {"user": "alice", "train": True, "metadata": {"client": "chat"}},
    "give_feedback": {"value": -1.0, "text": "answer in French"},
    "set_canary": {"pool": "policy", "candidate": "policy-next", "share": 0.05},
    "register_backend": {"url": "http://127.0.0.1:30000", "pool": "policy", "kind": "sglang"},
    "update_weights": {"path": "/checkpoints/step-10", "version": 10},
    "join_weights_group": {"master_address": "10.0.0.1", "master_port": 29500, "world_size": 3},
    "patch_node": {"rollout": {"workers": 64}, "sandboxes": {"ceiling": 128}},
    "pause_pool": {"pool": "policy", "mode": "abort"},
    "resume_pool": {"pool": "policy"},
    "process": {
        "job_id": "job-1",
        "instance": {"data_source": "calc", "question": "What is 6 * 7?", "answer": "42"},
        "sampling_params": {"temperature": 1.0},
    },
    "cancel_job": {"job_id": "job-1"},
    "add_llm_server": {"address": "127.0.0.1:30000"},
}

_ROLLOUT = {
    "rollout_id": "first-42",
    "state": "completed",
    "task": TASK,
    "pool": "policy",
    "attempt": 1,
    "reward": 1.0,
    "stop_reason": "finished",
    "usage": {"turns": 2, "prompt_tokens": 310, "sampled_tokens": 41, "tool_calls": 2},
    "created_at": "2026-01-01T00:00:00Z",
    "finished_at": "2026-01-01T00:00:04Z",
}
_RUN = {
    "run_id": "calc-1",
    "state": "running",
    "request": REQUESTS["create_run"],
    "version": 0,
    "tasks": 1,
    "cursor": 1,
    "acceptance_rate": 0.5,
    "counts": {"open": 1},
    "created_at": "2026-01-01T00:00:00Z",
}

RESPONSES: dict[str, dict[str, Any]] = {
    "submit_rollout": {
        "200": _ROLLOUT,
        "202": {**_ROLLOUT, "state": "queued", "reward": None, "finished_at": None},
    },
    "get_rollout": {"200": _ROLLOUT},
    "list_rollouts": {"200": {"rollouts": [_ROLLOUT], "counts": {"completed": 1}}},
    "create_run": {"201": _RUN},
    "get_run": {"200": _RUN},
    "list_runs": {"200": {"runs": [_RUN]}},
    "acknowledge_batch": {"200": {"batch_id": "calc-1.b0", "state": "acknowledged"}},
}

PROBLEM = {
    "type": "about:blank",
    "title": "Invalid field",
    "status": 422,
    "detail": "body.task.environment: there is no environment 'clac'; did you mean calc? Known environments: calc.",
    "code": "invalid_field",
    "retryable": False,
    "errors": [{"path": "body.task.environment", "message": "there is no environment 'clac'; did you mean calc?"}],
    "context": {"environments": ["calc"]},
}
