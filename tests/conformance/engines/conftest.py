"""Real engines for the contract and agreement suites start once per test run, and are reset for each test."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from anyio.from_thread import start_blocking_portal

from rollout_service.engines.kinds.embedded.process import EmbeddedEngine
from rollout_service.engines.kinds.sglang.backend import SGLangBackend
from rollout_service.engines.kinds.vllm.backend import VllmBackend
from rollout_service.engines.local_servers.cpu_server import SGLangCpuServer
from rollout_service.engines.local_servers.process import ServerProcess
from rollout_service.engines.local_servers.vllm_cpu import CACHE_BLOCK, VllmCpuServer
from rollout_service.testing import Counting, ScriptedEngine, ScriptedVllm, Shape, write_random_checkpoint
from tests.support.engines.engine_under_test import Checkpoints, EngineUnderTest, until_idle


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


@pytest.fixture
def scripted_vllm_url(checkpoints: Checkpoints) -> Iterator[str]:
    engine = ScriptedVllm(
        Counting(512), latency=0.5, context_length=2048, model_path=checkpoints.first, vocab_size=512
    )
    yield from serving(engine)


@pytest.fixture
def scripted_url(checkpoints: Checkpoints) -> Iterator[str]:
    engine = ScriptedEngine(
        Counting(512), latency=0.5, context_length=2048, model_path=checkpoints.first, vocab_size=512
    )
    yield from serving(engine)


# vLLM takes a minute to start, and several on a busy machine.
VLLM = [pytest.mark.vllm, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(480)]
REAL = [
    pytest.param("embedded", id="embedded"),
    pytest.param(
        "sglang",
        id="sglang",
        marks=[pytest.mark.sglang, pytest.mark.xdist_group("sglang"), pytest.mark.timeout(480)],
    ),
    pytest.param("vllm", id="vllm", marks=VLLM),
]
SCRIPTED = [pytest.param("scripted", id="scripted"), pytest.param("scripted_vllm", id="scripted-vllm")]


@asynccontextmanager
async def prepared(url: str, kind: str, checkpoints: Checkpoints) -> AsyncIterator[EngineUnderTest]:
    backend = (VllmBackend if "vllm" in kind else SGLangBackend)(url, backend_id=kind)
    await backend.resume()
    await until_idle(backend)  # the last test may have cancelled a request
    await backend.update_weights(str(checkpoints.first), 0)
    cache_block = CACHE_BLOCK if "vllm" in kind else 1
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
