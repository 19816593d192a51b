"""Requests that only another node can answer. Each is passed on at most once, with its caller's own key."""

from __future__ import annotations

import ssl
import time
from collections.abc import Mapping
from functools import cache

import anyio.to_thread
import httpx
from fastapi import Request
from fastapi.responses import Response

from api_schemas.nodes import NodeState
from api_schemas.rollouts import RolloutState
from rollout_service.base.errors import NotFoundError, UnavailableError
from rollout_service.server.lifecycle import Service

PASSED_ON = "x-rollout-passed-on"
PASSED_HEADERS = ("authorization", "x-rollout-key", "content-type")
LOOK_SECONDS = 1.0
ANSWER_SECONDS = 30.0
"""The time to answer, in addition to the time for which the other node is asked to wait."""


async def wait_for_access(service: Service, http: Request, rollout_id: str, seconds: float) -> Response | None:
    """Return the answer of the node that runs a rollout; None, after waiting here, if this node has to answer.

    Raises:
        UnavailableError: The node that runs the rollout cannot be reached.
        ShuttingDownError: The shutdown began first.
    """
    if not service.settings.store.url or PASSED_ON in http.headers:
        await service.wait_for_access(rollout_id, seconds)
        return None
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        rollout = await service.wait_for_access(rollout_id, min(left, LOOK_SECONDS))
        if rollout.access is not None or rollout.state.terminal:
            return None
        if rollout.state is RolloutState.QUEUED:
            continue  # no node has its program yet, and who holds it is a question for each of them
        query = {**http.query_params, "wait": f"{max(0.0, deadline - time.monotonic()):.3f}"}
        passed = await pass_on(service, http, rollout_id, query=query)
        if passed is not None:
            return passed
    return None


async def pass_on(
    service: Service,
    http: Request,
    rollout_id: str,
    *,
    query: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> Response | None:
    """Have the node that runs a rollout answer a request; None if no other node runs it or the request was passed on.

    Raises:
        UnavailableError: That node cannot be reached.
    """
    if PASSED_ON in http.headers or (address := await _address(service, rollout_id)) is None:
        return None
    return await _send(http, address, f"the node that runs rollout {rollout_id}", query, body)


async def ask_node(service: Service, http: Request, node: str) -> Response | None:
    """Have a node answer a request; None if this is that node.

    Raises:
        NotFoundError: There is no such node.
        UnavailableError: The node is dead, or cannot be reached.
    """
    if PASSED_ON in http.headers or node == service.node.name:
        return None
    for record in await service.store.cluster.nodes():
        if record.report.name == node:
            if record.state is NodeState.DEAD or not record.report.address:
                raise UnavailableError(f"node {node} is dead, or has no address", hint="See GET /v1/nodes.")
            return await _send(http, record.report.address, f"node {node}", dict(http.query_params))
    raise NotFoundError(f"there is no node {node!r}", hint="List them with GET /v1/nodes.")


async def _send(
    http: Request,
    address: str,
    who: str,
    query: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> Response:
    headers = {name: http.headers[name] for name in PASSED_HEADERS if name in http.headers}
    seconds = float((query or {}).get("wait", 0)) + ANSWER_SECONDS
    trusted = await anyio.to_thread.run_sync(_trusted_certificates)
    try:
        async with httpx.AsyncClient(timeout=seconds, trust_env=False, verify=trusted) as client:
            answer = await client.request(
                http.method,
                f"{address}{http.url.path}",
                params=query,
                content=body,
                headers={**headers, PASSED_ON: "1"},
            )
    except httpx.HTTPError as error:
        raise UnavailableError(
            f"{who} cannot be reached at {address}: {error!r}",
            hint="Set [cluster] address of that node to the URL at which other nodes reach it.",
        ) from error
    return Response(answer.content, status_code=answer.status_code, media_type=answer.headers.get("content-type"))


@cache
def _trusted_certificates() -> ssl.SSLContext:
    """Read the certificates once, since that takes a tenth of a second."""
    return httpx.create_ssl_context(trust_env=False)


async def _address(service: Service, rollout_id: str) -> str | None:
    own = service.nodes.own().owner
    for record in await service.store.cluster.nodes():
        report = record.report
        if record.state is NodeState.DEAD or report.owner == own or not report.address:
            continue
        if rollout_id in await service.store.held(report.owner):
            return report.address
    return None
