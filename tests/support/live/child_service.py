"""A service in a process of its own, whose policy and judge are scripted engines in this process.

Every id that the policy's engine samples is kept, so that what is recorded can be compared with what was sent.
"""

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.runs import InlineTasks, RunRequest
from api_schemas.runs.live import LiveDelivery
from rollout_client.client import ClientRun, RolloutClient
from rollout_service.cli.server_child import running_child
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Reply, Script, ScriptedEngine
from rollout_service.testing.engine_turn import ChunkStream, EngineTurn, ScriptedRequest
from rollout_service.tokens import ChatRenderer

POLICY = policy_folder("calc-tuned")
END = "<|im_end|>"
ASSISTANT = "<|im_start|>assistant\n"
SETTINGS = """
[sandbox]
provider = "local"
[sandboxes.pressure]
enabled = false
"""


class Echoes:
    """A script whose answers repeat the last word of the prompt's last message, and go on where one was interrupted."""

    def __init__(self) -> None:
        self.renderer = ChatRenderer.load(POLICY)

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        """Return what the prompt lacks of the answer."""
        del budget
        before, found, given = self.renderer.decode(input_ids).rpartition(ASSISTANT)
        if not found:  # the service tries its engine
            return Reply(self.renderer.encode(END))
        words = re.findall(r"[\w-]+", before.replace("im_end", "").replace("im_start", ""))
        answer = self.renderer.encode(f"You said {words[-1] if words else 'nothing'}.{END}")
        return Reply(answer[len(self.renderer.encode(given)) :])


class Praise:
    """A script that votes 1, whatever it is asked."""

    def __init__(self) -> None:
        self._ids = ChatRenderer.load(POLICY).encode(f"It is good: \\boxed{{1}}{END}")

    def reply(self, input_ids: Sequence[int], budget: int) -> Reply:
        """Return the vote."""
        _ = input_ids, budget
        return Reply(self._ids)


class RecordingEngine(ScriptedEngine):
    """An engine that keeps what it samples."""

    def __init__(self, script: Script, **options: Any) -> None:
        super().__init__(script, **{"model_path": POLICY, "vocab_size": 512} | options)
        self.sampled: list[list[int]] = []

    async def _run(self, asked: ScriptedRequest, stream: ChunkStream | None = None) -> EngineTurn:
        turn = await super()._run(asked, stream)
        self.sampled.append(list(turn.reply.ids[: turn.done]))
        return turn


@dataclass(frozen=True, slots=True)
class LiveService:
    """A running service."""

    client: RolloutClient
    folder: Path
    """Its state folder."""
    engine: RecordingEngine

    async def train(self, **live: Any) -> ClientRun:
        """Create a run that takes sessions as soon as they have a value."""
        given = {"close_turns": 1_000, "max_user_share": 1.0, "max_session_share": 1.0} | live
        source = InlineTasks(tasks=[], open=True)
        return await self.client.create_run(
            RunRequest(
                run_id="live",
                source=source,
                live=LiveDelivery(**given),
                batch_size=1,
                group_size=1,
                filters=[],
            )
        )


@asynccontextmanager
async def live_service(
    folder: Path,
    settings: str = "",
    *,
    script: Script | None = None,
    judge: Script | None = None,
    **options: Any,
) -> AsyncIterator[LiveService]:
    """Run a service; without `judge`, its pool has no engine."""
    await anyio.Path(folder).mkdir(exist_ok=True)
    config = folder.with_name(f"{folder.name}.toml")
    await anyio.Path(config).write_text(SETTINGS + settings)
    flags = ["--config", str(config), "--engine", "none", "--log-level", "debug"]
    async with (
        RecordingEngine(script or Echoes(), **options) as engine,
        RecordingEngine(judge or Praise()) as judging,
        running_child(folder, [*flags, "--backend", engine.url]) as server,
    ):
        if judge is not None:
            await server.client.add_backend(BackendSpec(url=HttpUrl(judging.url), pool="judge"))
        yield LiveService(server.client, folder, engine)
