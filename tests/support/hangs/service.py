"""A service in this process with an environment whose agent runs one bash command, and what it says of hangs."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from api_schemas.events import Event
from api_schemas.inference import BackendSpec
from api_schemas.rollouts import Rollout, RolloutRequest
from api_schemas.views.hangs import HangFinding, HangReport
from rollout_client.client import RolloutClient
from rollout_service.server.hangs.verdicts import ENOUGH
from rollout_service.testing import Replies, ScriptedEngine
from rollout_service.testing.sglang_engine import json_answer
from sandboxes.config import LocalConfig
from tests.support.gateway.service import POLICY, GatewayService, gateway_service
from tests.support.turns import called, turn_of

NAMED_WITHIN = 30.0
"""Within how many seconds a hang has to be named."""
MODEL: dict[str, Any] = {"model_path": POLICY, "vocab_size": 512}
ENVIRONMENT = """
name = "commands"
image = "base"
prompt = "Do what you like."
tools = ["bash"]
[limits]
max_turns = {turns}
tool_seconds = 300
[evaluate]
command = "echo '{{\\"reward\\": 1.0}}' > $ROLLOUT_RESULT"
"""


class FreezingEngine(ScriptedEngine):
    """An engine that accepts connections and answers nothing once it is frozen."""

    frozen = False

    async def _handle(self, request: Any) -> Any:
        if self.frozen:
            await anyio.sleep_forever()
        return await super()._handle(request)


class CountingEngine(ScriptedEngine):
    """An engine whose report of its load changes with every token, like a real one's; a token takes a second."""

    async def _loads(self, body: dict[str, Any]) -> Any:
        report = {"num_running_reqs": self.in_flight, "num_waiting_reqs": 0, "token_usage": 0.0}
        return json_answer({"loads": [report | {"num_used_tokens": int(time.monotonic())}]})


def engine_of(*commands: str, **options: Any) -> FreezingEngine:
    """Return an engine whose turns are bash commands, one after the other."""
    script = Replies.from_texts([call(command) for command in commands], POLICY)
    return FreezingEngine(script, **MODEL, **options)


def call(command: str) -> str:
    """Return the turn that calls bash."""
    return turn_of(called("bash", command=command))


@dataclass(frozen=True, slots=True)
class HangService:
    """A running service."""

    inner: GatewayService

    @property
    def client(self) -> RolloutClient:
        """Its client."""
        return self.inner.client

    async def submit(self, rollout_id: str, **fields: Any) -> Rollout:
        """Submit a rollout."""
        task = {"environment": "commands", "instance": {}}
        request = RolloutRequest.model_validate({"rollout_id": rollout_id, "task": task} | fields)
        return await self.client.submit(request)

    async def add_backend(self, url: str, pool: str) -> None:
        """Add an engine to a pool of its own."""
        await self.client.add_backend(BackendSpec.model_validate({"url": url, "pool": pool}))

    async def makes_history(self, pool: str) -> None:
        """Complete as many rollouts in a pool as it takes to tell how long their steps usually take."""
        ids = [f"{pool}-{number}" for number in range(ENOUGH)]
        for rollout_id in ids:
            await self.submit(rollout_id, pool=pool)
        for rollout_id in ids:
            await self.client.wait(rollout_id, timeout_seconds=60)

    async def report(self) -> HangReport:
        """Ask the service over HTTP."""
        return await self.client.hangs()

    async def finding(self, wanted: Callable[[HangFinding], bool]) -> HangFinding:
        """Return the first finding like this, which has to come within the time that a hang may go unnamed."""
        deadline = time.monotonic() + NAMED_WITHIN
        while time.monotonic() < deadline:
            report = await self.report()
            if (found := next((one for one in report.findings if wanted(one)), None)) is not None:
                return found
            await anyio.sleep(0.1)
        raise AssertionError(f"not named within {NAMED_WITHIN:g} s: {report}")

    async def ended(self, finding_id: str) -> list[Event]:
        """Wait until a finding has ended, and return its events."""
        with anyio.fail_after(NAMED_WITHIN):
            while True:
                events = [event async for event in self._all_events()]
                mine = [event for event in events if event.data.get("finding_id") == finding_id]
                if mine and mine[-1].kind == "hang.ended":
                    assert finding_id not in [one.finding_id for one in (await self.report()).findings]
                    return mine
                await anyio.sleep(0.1)

    async def _all_events(self) -> AsyncIterator[Event]:
        store = self.inner.app.state.service.store
        for event in await store.events(after=0, limit=10_000):
            yield event


@asynccontextmanager
async def hang_service(
    folder: Path, engines: Sequence[ScriptedEngine], *, turns: int = 1, **settings: Any
) -> AsyncIterator[HangService]:
    """Run a service with these engines and the environment `commands`."""
    environment = folder / "commands"
    environment.mkdir()
    (environment / "environment.toml").write_text(ENVIRONMENT.format(turns=turns))
    state = folder / "state"
    # A short path, because sockets are created below it.
    given: dict[str, Any] = {
        "sandbox": LocalConfig(provider="local"),
        "environments": [environment],
        "sandboxes": {"pressure": {"enabled": False}},
    }
    async with gateway_service(state, engines, **given | settings) as service:
        yield HangService(service)
