"""The models of pools besides the policy's, as a command's options name them; they end with the command."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import structlog
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict, HttpUrl, JsonValue, ValidationError

from api_schemas.inference import BackendSpec, BackendState
from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.base.validation import describe_problems
from rollout_service.cli import common
from rollout_service.cli.common import CommandError, name_value_pairs
from rollout_service.cli.submit.files import read_whole
from rollout_service.engines.kinds.embedded.process import EmbeddedEngine
from rollout_service.engines.pool.pool import BackendPool
from rollout_service.engines.pool.pools import Pools
from rollout_service.engines.serving.policies import PolicyServing, PoolModel, backend_id_of_spec
from rollout_service.engines.serving.text_sampler import PoolTextSampler
from rollout_service.engines.shipped import model_folder, policy_folder
from rollout_service.environments.secrets import HostSecrets
from rollout_service.judging.judge import PoolJudge
from rollout_service.judging.metrics import JudgeMetrics
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import OtherModels
from rollout_service.settings import Settings
from rollout_service.store.file_backends import FileBackends
from rollout_service.testing import Replies, ScriptedEngine
from sandboxes import make_provider


@dataclass(frozen=True, slots=True)
class PoolModels:
    models: dict[str, str] = field(default_factory=dict)
    """Models of embedded engines."""
    scripts: dict[str, Path] = field(default_factory=dict)
    """Files with turns, which each conversation gets from the first on."""
    url: str | None = None
    """A server whose engines answer for all other pools."""
    key: str | None = None

    @classmethod
    def read(
        cls,
        models: Sequence[str] | None,
        scripts: Sequence[str] | None,
        url: str | None = None,
        key: str | None = None,
    ) -> PoolModels:
        named = name_value_pairs(models, "--pool-model")
        scripted = name_value_pairs(scripts, "--pool-script")
        if both := sorted(named.keys() & scripted.keys()):
            raise CommandError(
                f"--pool-model and --pool-script both name the pool {both[0]!r}",
                hint="Leave one of them out.",
            )
        return cls(named, {pool: Path(file) for pool, file in scripted.items()}, url, key)

    @asynccontextmanager
    async def engines(self) -> AsyncIterator[list[BackendSpec]]:
        """Start an engine for each model and script, and yield these and the server's, with their pools."""
        async with AsyncExitStack() as stack:
            found = await self._of_server()
            for pool, model in self.models.items():
                engine = await stack.enter_async_context(EmbeddedEngine(model_folder(model)))
                found.append(BackendSpec(url=HttpUrl(engine.url), pool=pool))
            for pool, path in self.scripts.items():
                turns = await anyio.to_thread.run_sync(read_turns, path)
                scripted = await stack.enter_async_context(scripted_engine(turns, path.name))
                found.append(BackendSpec(url=HttpUrl(scripted.url), pool=pool))
            yield found

    async def _of_server(self) -> list[BackendSpec]:
        if self.url is None:
            return []
        async with common.connect(self.url, self.key) as client:
            views = await client.backends()
        return [
            BackendSpec(url=HttpUrl(view.url), pool=view.pool, kind=view.kind, tokenizer=view.tokenizer_path)
            for view in views
            if view.state is BackendState.READY and view.pool not in {*self.models, *self.scripts}
        ]

    @asynccontextmanager
    async def trial(self, settings: Settings) -> AsyncIterator[tuple[SandboxSource, OtherModels]]:
        async with configured_sandboxes(settings) as (sandboxes, state), self.opened(state) as models:
            yield sandboxes, models

    @asynccontextmanager
    async def opened(self, state: Path) -> AsyncIterator[OtherModels]:
        """Yield the models of these pools for a trial; `state` is a folder that lives as long."""
        with _quiet():
            async with self.engines() as specs, Pools() as pools:
                serving = _NamedPools(pools, FileBackends(state / "backends.json", backend_id_of_spec))
                for spec in specs:
                    await serving.register(spec, remember=False)
                sampler = PoolTextSampler(serving)
                judge = PoolJudge(sampler, JudgeMetrics(CollectorRegistry()))
                yield OtherModels(judge, sampler, serving)


@asynccontextmanager
async def configured_sandboxes(settings: Settings) -> AsyncIterator[tuple[SandboxSource, Path]]:
    with tempfile.TemporaryDirectory(prefix="rollout-trial-") as state:
        provider = make_provider(settings.sandbox, Path(state), settings.images_dir)
        try:
            yield (
                SandboxSource(provider, secrets=HostSecrets(settings.secrets), settings=settings.sandboxes),
                Path(state),
            )
        finally:
            with anyio.CancelScope(shield=True):
                await provider.close()


@contextmanager
def _quiet() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )
    try:
        yield
    finally:
        structlog.configure(**before)


class _NamedPools(PolicyServing):
    """The pools that options name; errors about others say which option would add them."""

    def connect(self, pool: str) -> tuple[PoolModel, BackendPool]:
        if not self.expects(pool):
            raise EnvironmentFailedError(
                f"the environment asks the model of the pool {pool!r}, and nothing answers for it here",
                hint=f"Add --pool-model {pool}=MODEL, --pool-script {pool}=FILE with its turns, or the --url of a "
                "server that has the pool.",
            )
        return super().connect(pool)


# A scripted model: fixed turns from a file, one JSON object per line, to try an environment without a policy. Turns are
# written in the format of the shipped policies, whose tokenizer can encode any text.

POLICY = "calc-tuned"
END = "<|im_end|>"
TURN_HINT = 'Write one turn per line, such as {"content": "42"} or {"tool_calls": [{"name": "bash", "arguments": {}}]}.'


class ScriptedCall(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    arguments: dict[str, JsonValue] = {}

    def text(self) -> str:
        return f"<tool_call>\n{json.dumps(self.model_dump(), ensure_ascii=False)}\n</tool_call>"


class ScriptedTurn(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    content: str = ""
    tool_calls: list[ScriptedCall] = []

    def text(self) -> str:
        parts = [self.content, *(call.text() for call in self.tool_calls)]
        return "\n".join(part for part in parts if part) + END


def read_turns(path: Path) -> list[str]:
    turns = []
    for number, line in enumerate(read_whole(path).split(b"\n"), start=1):
        if line.strip():
            try:
                turns.append(ScriptedTurn.model_validate_json(line).text())
            except ValidationError as error:
                what = "; ".join(describe_problems(error, ScriptedTurn))
                raise CommandError(f"{path}, line {number}: {what}", hint=TURN_HINT) from error
    if not turns:
        raise CommandError(f"the script {path} has no turns", hint=TURN_HINT)
    return turns


def scripted_engine(turns: list[str], name: str) -> ScriptedEngine:
    """Return an engine that answers with these turns in order, to be entered; it calls its model `script NAME`."""
    folder = policy_folder(POLICY)
    vocab_size = json.loads((folder / "config.json").read_bytes())["vocab_size"]
    replies = Replies.from_texts(turns, folder)
    return ScriptedEngine(replies, vocab_size=vocab_size, model_path=f"script {name}", tokenizer_path=folder)
