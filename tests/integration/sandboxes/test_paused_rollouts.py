"""A service pauses the sandbox of a rollout that waits for its engine, and whatever comes next finds it as it was."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from api_schemas.nodes import SandboxView
from api_schemas.rollouts import RolloutState
from rollout_service.testing import Replies, ScriptedEngine
from sandboxes import ApptainerConfig
from sandboxes.limits.cgroups import find_control_groups
from sandboxes.limits.freezer import Freezer
from tests.support.gateway.service import POLICY
from tests.support.hangs import service as hangs
from tests.support.hangs.service import HangService, call, hang_service

pytestmark = [pytest.mark.apptainer, pytest.mark.timeout(180)]

COMMANDS = (
    "(while :; do date +%s.%N; sleep 0.05; done >beats 2>/dev/null &); NAME=kept; echo file >file",
    "sleep 1; sort -n beats | awk 'NR > 1 && $1 - last > gap { gap = $1 - last } { last = $1 } "
    "END { print (gap > 1.5) }'; echo $NAME; cat file",
    "true",
)
PAUSE_SECONDS, WAIT_SECONDS = 0.3, 2.5
CAN_PAUSE = find_control_groups().pausing != "none"


class WaitingEngine(ScriptedEngine):
    """An engine that answers from its second turn on only once it may."""

    def __init__(self) -> None:
        script = Replies.from_texts([call(command) for command in COMMANDS], POLICY)
        super().__init__(script, model_path=POLICY, vocab_size=512)
        self.may_answer = anyio.Event()
        self.waits = anyio.Event()

    async def _generate(self, body: dict[str, Any], request: Any) -> Any:
        if self.requests > 1:  # the service checks an engine with the first
            self.waits.set()
            await self.may_answer.wait()
        return await super()._generate(body, request)


@asynccontextmanager
async def waiting_service(folder: Path, **settings: Any) -> AsyncIterator[tuple[HangService, WaitingEngine]]:
    """Yield a service with a rollout whose engine keeps it waiting after its first command."""
    sandboxes = {"pressure": {"enabled": False}, "pause_seconds": PAUSE_SECONDS, "warm": {"size": 0}}
    given = {"sandbox": ApptainerConfig(), "sandboxes": sandboxes} | settings
    async with (
        WaitingEngine() as engine,
        hang_service(folder, [engine], turns=len(COMMANDS), **given) as service,
    ):
        await service.submit("waits")
        with anyio.fail_after(60):
            await engine.waits.wait()
        yield service, engine


async def sandbox_of(service: HangService) -> SandboxView:
    [found] = [one for one in await service.client.sandboxes() if one.label == "waits"]
    return found


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(30):
        while not await holds():
            await anyio.sleep(0.05)


async def is_paused(service: HangService) -> bool:
    return (await sandbox_of(service)).state == "paused" or not CAN_PAUSE


async def has_no_sandbox(service: HangService) -> bool:
    return await service.client.sandboxes() == []


async def metric(service: HangService, line: str) -> bool:
    return line in (await service.inner.metrics()).splitlines()


async def test_a_rollout_goes_on_in_the_sandbox_that_was_paused(tmp_path):
    async with waiting_service(tmp_path) as (service, engine):
        await until(lambda: is_paused(service))
        await anyio.sleep(WAIT_SECONDS)
        assert await is_paused(service)
        assert await metric(service, f'rollout_sandboxes{{state="paused"}} {CAN_PAUSE:.1f}')
        assert await metric(service, f'rollout_sandbox_pauses_total{{outcome="paused"}} {CAN_PAUSE:.1f}')
        findings = (await service.report()).findings
        assert [one for one in findings if "sandbox" in f"{one.kind} {one.subject} {one.detail}"] == []
        [node] = await service.client.nodes()
        assert node.pausing == find_control_groups().pausing
        engine.may_answer.set()
        finished = await service.client.wait("waits", timeout_seconds=60)
        assert finished.state is RolloutState.COMPLETED, finished.error
        messages = (await service.client.trajectory("waits")).messages
        results = [message.content for message in messages if message.role == "tool"]
        assert results[1] == f"{CAN_PAUSE:d}\nkept\nfile"
        assert await metric(service, 'rollout_sandbox_pauses_total{outcome="failed"} 0.0')


async def test_a_rollout_is_cancelled_while_its_sandbox_is_paused(tmp_path):
    async with waiting_service(tmp_path) as (service, _):
        await until(lambda: is_paused(service))
        await service.client.cancel("waits")
        with anyio.fail_after(10):
            finished = await service.client.wait("waits", timeout_seconds=10)
        assert finished.state is RolloutState.CANCELLED

        await until(lambda: has_no_sandbox(service))


async def test_a_rollout_whose_sandbox_cannot_be_resumed_fails_and_leaves_nothing(tmp_path, monkeypatch):
    write = Freezer._write

    def refuse_to_resume(self: Freezer, *, frozen: bool) -> None:
        if self.frozen and not frozen:
            raise PermissionError("refused")
        write(self, frozen=frozen)

    monkeypatch.setattr(Freezer, "_write", refuse_to_resume)
    async with waiting_service(tmp_path, pipeline={"max_attempts": 1}) as (service, engine):
        await until(lambda: is_paused(service))
        engine.may_answer.set()
        finished = await service.client.wait("waits", timeout_seconds=60)
        assert (finished.error is not None and finished.error.code == "sandbox_resume") == CAN_PAUSE
        assert finished.state is (RolloutState.FAILED if CAN_PAUSE else RolloutState.COMPLETED)
        await until(lambda: has_no_sandbox(service))


async def test_a_sandbox_of_an_environment_without_pauses_is_not_paused(tmp_path, monkeypatch):
    monkeypatch.setattr(hangs, "ENVIRONMENT", f"{hangs.ENVIRONMENT}[sandbox]\npause = false\n")
    async with waiting_service(tmp_path) as (service, engine):
        await anyio.sleep(4 * PAUSE_SECONDS)
        assert (await sandbox_of(service)).state == "in_use"
        engine.may_answer.set()
        finished = await service.client.wait("waits", timeout_seconds=60)
        assert finished.state is RolloutState.COMPLETED, finished.error
