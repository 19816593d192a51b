"""A trainer's engine without HTTP serves the service as SGLang would, or refuses what it cannot answer as asked."""

import logging
import sys
from types import SimpleNamespace
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from api_schemas.inference import PauseMode
from api_schemas.trajectories import FinishReason
from rollout_client.adapters.engine_server import EngineServer
from rollout_client.adapters.openrlhf import Executor
from rollout_client.errors import UnreachableError
from rollout_service.engines.contract import GenerateRequest, SamplingOptions, new_request_id
from rollout_service.engines.errors import (
    BackendRejected,
    BackendUnreachable,
    PromptTooLong,
    SchemaRefused,
)
from rollout_service.engines.kinds.registry import ask_kind
from rollout_service.engines.kinds.sglang.backend import SGLangBackend
from tests.support.adapters.async_engine import (
    LOGPROB,
    FakeEngine,
    ModelConfig,
    RequestOutputKind,
    install,
    serving,
    stop,
)
from tests.support.adapters.rollouts import TASK, FakeClient, rollout, segment
from tests.support.waiting import collect, until

pytestmark = pytest.mark.anyio

PROMPT = [3, 4, 5]


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    install(monkeypatch)


def request(**sampling) -> GenerateRequest:
    return GenerateRequest(new_request_id(), PROMPT, SamplingOptions(**sampling), cache_salt="mine")


class Connected:
    """A backend for an engine, as an async context manager."""

    def __init__(self, engine: FakeEngine) -> None:
        self.context = serving(engine)

    async def __aenter__(self) -> tuple[EngineServer, SGLangBackend]:
        server, address = await self.context.__aenter__()
        self.backend = SGLangBackend(address)
        return server, self.backend

    async def __aexit__(self, *exc: object) -> None:
        await self.backend.close()
        await self.context.__aexit__(*exc)


async def test_a_turn_has_the_engines_tokens_and_logprobs():
    engine = FakeEngine()
    async with Connected(engine) as (server, backend):
        server.version = 4
        info = await backend.model_info()
        generation = await backend.generate(request(max_new_tokens=5, stop=["</x>"], seed=6))
    assert (info.model_path, info.tokenizer_path) == ("some/model", "some/tokenizer")
    assert (info.weight_version, info.vocab_size, info.context_length) == (4, 512, 2048)
    assert generation.output_ids == [7, 8, 9]
    assert generation.logprobs == [LOGPROB] * 3
    assert generation.versions == [4] * 3
    assert (generation.finish_reason, generation.cached_tokens) == (FinishReason.STOP, 2)
    ((prompt, given, _),) = engine.asked
    assert prompt == {"prompt_token_ids": PROMPT, "cache_salt": "weights-4-mine"}
    assert (given.max_tokens, given.seed, given.logprobs) == (5, 6, 0)
    assert (given.stop, given.detokenize, given.include_stop_str_in_output) == (["</x>"], True, True)
    assert given.output_kind is RequestOutputKind.DELTA


async def test_a_streamed_turn_comes_as_a_whole():
    chunks = []
    async with Connected(FakeEngine()) as (_, backend):
        generation = await backend.generate(request(max_new_tokens=2), chunks.append)
    assert [chunk.ids for chunk in chunks] == [generation.output_ids] == [[7, 8]]
    assert generation.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("mode", "sampling", "is_served"),
    [
        ("raw_logprobs", {}, True),
        ("raw_logprobs", {"top_p": 0.9}, True),
        ("raw_logprobs", {"temperature": 0.7}, False),
        ("raw_logprobs", {"temperature": 0.0}, True),
        ("processed_logprobs", {"temperature": 0.7}, True),
        ("processed_logprobs", {"top_k": 20}, False),
        ("processed_logprobs", {"min_p": 0.1}, False),
        ("processed_logprobs", {"top_k": 1}, True),
        ("processed_logits", {}, False),
    ],
)
async def test_no_logprobs_of_another_distribution_are_returned(mode, sampling, is_served):
    engine = FakeEngine(model=ModelConfig(logprobs_mode=mode))
    async with Connected(engine) as (_, backend):
        if is_served:
            assert (await backend.generate(request(**sampling))).output_ids == [7, 8, 9]
            return
        with pytest.raises(BackendRejected, match=f"the engine, with {mode}, does not compute the logprobs"):
            await backend.generate(request(**sampling))
        assert engine.asked == []


async def test_what_the_engine_would_cut_or_does_not_know_is_refused():
    async with Connected(FakeEngine(model=ModelConfig(max_model_len=10))) as (_, backend):
        with pytest.raises(PromptTooLong, match="context length of 10"):
            await backend.generate(request(max_new_tokens=8))
        with pytest.raises(SchemaRefused, match="no sampling parameter json_schema"):
            await backend.generate(request(max_new_tokens=7, json_schema="{}"))
        with pytest.raises(BackendRejected, match="its trainer's"):
            await backend.update_weights("/a/folder", 2)


@pytest.mark.parametrize("everything", [False, True])
async def test_an_aborted_request_hands_back_what_it_has(everything):
    engine = FakeEngine(ends=False)
    async with Connected(engine) as (_, backend), anyio.create_task_group() as tasks:
        asked, answers = request(), []
        tasks.start_soon(collect, answers, lambda: backend.generate(asked))
        while (load := await backend.load()).used_tokens != len(PROMPT) + 3:
            await anyio.sleep(0.01)
        assert (load.running, load.capacity_tokens) == (1, 160)
        await backend.abort(None if everything else asked.request_id)
        await until(lambda: answers)
        assert answers[0].output_ids == [7, 8, 9]
        assert answers[0].finish_reason is FinishReason.ABORT
        assert (await backend.load()).running == 0


async def test_a_cancelled_call_ends_in_the_engine_also_if_it_was_on_its_way():
    engine = FakeEngine(ends=False)
    engine.may_begin = anyio.Event()
    async with Connected(engine) as (_, backend):
        with anyio.move_on_after(0.05):
            await backend.generate(request())
        await anyio.sleep(0.1)
        assert engine.unfinished == {}
        engine.may_begin.set()
        with anyio.fail_after(10):
            while (await backend.load()).running:
                await anyio.sleep(0.01)
        assert engine.unfinished == {}


async def test_the_service_ends_its_own_pause_and_not_the_trainers():
    engine = FakeEngine()
    async with Connected(engine) as (_, backend):
        await backend.resume()
        assert engine.orders == []
        await backend.pause(PauseMode.IN_PLACE)
        await backend.resume()
        await backend.resume()
    assert engine.orders == [("pause", "keep", False), "resume"]


async def test_a_failure_of_the_engine_is_one_of_the_backend():
    engine = FakeEngine()
    async with Connected(engine) as (_, backend):
        await backend.health()
        engine.error = RuntimeError("EngineCore is gone")
        with pytest.raises(BackendUnreachable, match="RuntimeError: EngineCore is gone"):
            await backend.generate(request())
        with pytest.raises(BackendUnreachable):
            await backend.health()
        engine.error = ValueError("Token id 900 is out of vocabulary")
        with pytest.raises(BackendRejected, match="out of vocabulary"):
            await backend.generate(request())
        assert (await backend.load()).running == 0


async def test_nobody_uses_the_engine_without_its_path():
    async with serving(FakeEngine()) as (_, address), httpx.AsyncClient() as http:
        parts = urlsplit(address)
        assert len(parts.path) > 24
        assert await ask_kind(address) == "sglang"
        for path in ("", "/", parts.path[:-1], f"/{'ä' * 40}"):
            answer = await http.get(f"http://{parts.netloc}{path}/model_info")
            assert answer.status_code == 404
        assert (await http.get(f"{address}/model_info")).status_code == 200


async def test_a_missing_http_server_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(RuntimeError, match="pip install uvicorn"):
        await EngineServer(FakeEngine()).start("127.0.0.1")


# OpenRLHF's executor.


@pytest.fixture
async def executor(monkeypatch, anyio_backend):
    client = FakeClient(*[rollout(segment([1, 2, 3], [0, 1, 1]))] * 4)
    executor = Executor(client.submitter())
    told = executor.told = []

    async def follow(addresses, version):
        if told and isinstance(told[0], Exception):
            raise told.pop(0)
        told.append((*addresses, version))
        return executor.engines.submitter

    monkeypatch.setattr(executor.engines, "follow", follow)
    yield executor
    if executor._server is not None:
        await stop(executor._server)


def call(executor, engine):
    params = SimpleNamespace(temperature=1.0, max_tokens=8)
    return executor.execute(TASK.model_dump(mode="json"), None, params, 100, None, engine)


async def test_the_actors_engine_is_served_once_and_its_updates_are_versions(executor, caplog):
    engine = FakeEngine()
    actor = SimpleNamespace(llm=engine)
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(call, executor, actor)
    (address,) = {address for address, _ in executor.told}
    assert address.startswith("http://127.0.0.1:")
    assert [version for _, version in executor.told] == [0, 0, 0]
    for is_last in (False, True):
        assert await engine.collective_rpc("update_weight", args=("w", "float32", (1,), is_last)) == ["done"]
    await engine.collective_rpc("init_process_group", args=("host", 1))
    assert executor.told[3:] == [(address, 1)]
    executor.told[:] = [UnreachableError("away")]
    with caplog.at_level(logging.WARNING):
        await engine.collective_rpc("update_weight_cuda_ipc", args=("w", "float32", (1,), {}, True))
    assert "does not know of version 2 yet: away" in caplog.text
    await call(executor, actor)
    assert executor.told == [(address, 2)]


async def test_an_engine_in_rays_cluster_listens_at_its_nodes_address(executor, monkeypatch):
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.2")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, util=util))
    await call(executor, FakeEngine())
    assert executor.told[0][0].startswith("http://127.0.0.2:")


async def test_an_engine_listens_at_an_address_of_six_groups():
    server = EngineServer(FakeEngine())
    assert (await server.start("::1")).startswith("http://[::1]:")
    await stop(server)
