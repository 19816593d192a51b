"""Real engines for the contract and agreement suites start once per test run, and are reset for each test.

An engine of a plug-in joins them: `ROLLOUT_ENGINE_KIND` is its kind, and `ROLLOUT_ENGINE_COMMAND` the command that
serves the Qwen3 checkpoint `{model}` at `127.0.0.1:{port}`, with a route `/health`.
"""

import os
import shlex
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from rollout_service.engines.kinds.embedded.process import EmbeddedEngine
from rollout_service.engines.kinds.registry import SGLANG, VLLM, EngineKinds
from rollout_service.engines.local_servers.cpu_server import SGLangCpuServer
from rollout_service.engines.local_servers.process import ServerCommand, ServerProcess
from rollout_service.testing import Counting, ScriptedEngine, ScriptedVllm, Shape, write_random_checkpoint
from sandboxes.host.ports import free_port
from tests.support.engines.engine_under_test import ON_SGLANG, ON_VLLM, Checkpoints, EngineUnderTest, until_idle
from tests.support.vllm_cpu import CACHE_BLOCK, VllmCpuServer


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("checkpoints")
    return Checkpoints(
        write_random_checkpoint(folder / "first", seed=1), write_random_checkpoint(folder / "second", seed=2)
    )


@pytest.fixture(scope="session")
def untied_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Create models for vLLM, which on a CPU cannot reload one whose output layer is tied to the embeddings."""
    folder, shape = tmp_path_factory.mktemp("untied"), Shape(tied=False)
    return Checkpoints(
        write_random_checkpoint(folder / "first", shape, seed=1),
        write_random_checkpoint(folder / "second", shape, seed=2),
    )


def serving(server: ServerProcess | ScriptedEngine) -> Iterator[str]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server) as running:
        yield running.url


@pytest.fixture(scope="session")
def embedded_url(checkpoints: Checkpoints) -> Iterator[str]:
    yield from serving(EmbeddedEngine(checkpoints.first))


@pytest.fixture(scope="session")
def sglang_url(checkpoints: Checkpoints) -> Iterator[str]:
    yield from serving(SGLangCpuServer(checkpoints.first))


@pytest.fixture(scope="session")
def vllm_url(untied_checkpoints: Checkpoints) -> Iterator[str]:
    yield from serving(VllmCpuServer(untied_checkpoints.first))


class PlugInServer(ServerProcess):
    """The engine that the variables name."""

    start_seconds = 420.0

    def __init__(self, model: Path) -> None:
        super().__init__()
        self._model = model

    def _server_command(self, folder: Path) -> ServerCommand:
        port = free_port()
        values = {"model": str(self._model), "port": str(port)}
        words = shlex.split(os.environ["ROLLOUT_ENGINE_COMMAND"])
        return ServerCommand([word.format_map(values) for word in words], os.environ, lambda: port)


@pytest.fixture(scope="session")
def plug_in_url(checkpoints: Checkpoints) -> Iterator[str]:
    yield from serving(PlugInServer(checkpoints.first))


@pytest.fixture
def scripted_vllm_url(checkpoints: Checkpoints) -> Iterator[str]:
    engine = ScriptedVllm(Counting(512), latency=0.5, context_length=2048, model_path=checkpoints.first, vocab_size=512)
    yield from serving(engine)


@pytest.fixture
def scripted_url(checkpoints: Checkpoints) -> Iterator[str]:
    engine = ScriptedEngine(
        Counting(512), latency=0.5, context_length=2048, model_path=checkpoints.first, vocab_size=512
    )
    yield from serving(engine)


REAL = [pytest.param("embedded", id="embedded"), ON_SGLANG, ON_VLLM]
if PLUG_IN_KIND := os.environ.get("ROLLOUT_ENGINE_KIND", ""):
    REAL.append(
        pytest.param("plug_in", id="plug-in", marks=[pytest.mark.xdist_group("plug-in"), pytest.mark.timeout(480)])
    )
SCRIPTED = [pytest.param("scripted", id="scripted"), pytest.param("scripted_vllm", id="scripted-vllm")]


@asynccontextmanager
async def prepared(url: str, name: str, checkpoints: Checkpoints) -> AsyncIterator[EngineUnderTest]:
    kind = {"vllm": VLLM, "scripted_vllm": VLLM, "plug_in": PLUG_IN_KIND}.get(name, SGLANG)
    backend = await EngineKinds().connect(url, name, kind)
    await backend.resume()
    await until_idle(backend)  # the last test may have cancelled a request
    await backend.update_weights(str(checkpoints.first), 0)
    cache_block = CACHE_BLOCK if kind == VLLM else 1
    yield EngineUnderTest(backend, checkpoints, await backend.model_info(), cache_block)
    await backend.abort()
    await backend.resume()
    await backend.close()


@asynccontextmanager
async def chosen(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> AsyncIterator[EngineUnderTest]:
    """Yield the engine that is the parameter of a fixture."""
    if request.param == "vllm":
        checkpoints = request.getfixturevalue("untied_checkpoints")
    url = request.getfixturevalue(f"{request.param}_url")
    async with prepared(url, request.param, checkpoints) as engine:
        yield engine


@pytest.fixture(params=REAL)
async def model_engine(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, anyio_backend: str
) -> AsyncIterator[EngineUnderTest]:
    """Yield each engine that runs a model, at version 0 of the first checkpoint, with an empty cache."""
    async with chosen(request, checkpoints) as engine:
        yield engine


@pytest.fixture(params=[*REAL, *SCRIPTED])
async def engine(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, anyio_backend: str
) -> AsyncIterator[EngineUnderTest]:
    """Yield each engine, real or scripted."""
    async with chosen(request, checkpoints) as engine:
        yield engine
