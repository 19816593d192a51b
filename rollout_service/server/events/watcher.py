"""Tells of what changes without a command of its own: engines, the node, and what holds sandboxes back.

Guarantee: something that changes all the time causes at most one event a second, since the watcher looks that often; a
state that comes and goes in between is missed. The parts that it watches do not know of it.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
from pydantic import JsonValue

from api_schemas.events import EventKind
from api_schemas.inference import BackendState, BackendView
from api_schemas.nodes import NodeState
from rollout_service.cluster.node import Node
from rollout_service.engines.serving.orders import Announce

PERIOD_SECONDS = 1.0
CALM_SECONDS = 5.0
"""How long nothing must hold sandboxes back before the hold is told to have ended."""


class StateWatcher:
    """Compares what is with what was."""

    def __init__(
        self,
        announce: Announce,
        node: Node,
        *,
        backends: Callable[[], list[BackendView]],
        claims: Callable[[], bool],
    ) -> None:
        """`backends` lists the engines; `claims` tells whether the node claims rollouts."""
        self._announce = announce
        self._node = node
        self._backends = backends
        self._claims = claims
        self._known: dict[str, BackendView] = {}
        self._claimed = True
        self._held_since: float | None = None
        self._held_last = 0.0
        self._held: dict[str, JsonValue] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            self.look(anyio.current_time())
            await anyio.sleep(PERIOD_SECONDS)

    def look(self, now: float) -> None:
        """Tell of everything that has changed since the last look."""
        self._look_at_backends()
        self._look_at_node()
        self._look_at_holds(now)

    def _look_at_backends(self) -> None:
        views = {view.backend_id: view for view in self._backends()}
        for backend_id, view in views.items():
            was = self._known.get(backend_id)
            if was is None or was.state is not view.state:
                self._tell_of_backend(view, view.state, was.state if was else None)
        for backend_id in self._known.keys() - views.keys():
            gone = self._known[backend_id]
            self._tell_of_backend(gone, "removed", gone.state)
        self._known = views

    def _tell_of_backend(self, view: BackendView, state: str, was: BackendState | None) -> None:
        data: dict[str, JsonValue] = {"node": self._node.name, "pool": view.pool, "state": str(state)}
        data["was"] = str(was) if was is not None else None
        if state is BackendState.FAILED:
            data["error"] = view.last_error
        self._announce(EventKind.BACKEND_STATE, view.backend_id, data)

    def _look_at_node(self) -> None:
        claims = self._claims()
        if claims is not self._claimed:
            state = NodeState.READY if claims else NodeState.DRAINING
            self._announce(EventKind.NODE_STATE, self._node.name, {"state": str(state)})
        self._claimed = claims

    def _look_at_holds(self, now: float) -> None:
        admission = self._node.admission
        holds = admission.hold_reasons if admission.waiting else ()
        if holds:
            self._held_last = now
            if self._held_since is None:
                self._held_since = now
                self._held = {"resource": holds[0].resource, "reason": holds[0].text}
                self._tell_of_hold({"state": "began", **self._held, "waiting": admission.waiting})
        elif self._held_since is not None and now - self._held_last >= CALM_SECONDS:
            seconds = round(self._held_last - self._held_since, 1)
            self._held_since = None
            self._tell_of_hold(
                {"state": "ended", **self._held, "waiting": admission.waiting, "seconds": seconds}
            )

    def _tell_of_hold(self, data: dict[str, JsonValue]) -> None:
        self._announce(EventKind.SANDBOX_HOLD, self._node.name, data)
