"""Engine processes start, or say why they cannot, and never outlive the process that started them."""

import os
import signal
import sys

import aiohttp
import anyio
import httpx
import orjson
import psutil
import pytest
from anyio.from_thread import start_blocking_portal

from rollout_service.engines.kinds.embedded.process import EmbeddedEngine
from rollout_service.engines.kinds.sglang.backend import SGLangBackend
from rollout_service.engines.local_servers.cpu_server import SGLangCpuServer
from rollout_service.engines.local_servers.process import EngineStartError
from rollout_service.testing import write_random_checkpoint
from tests.support.vllm_cpu import VllmCpuServer

pytestmark = pytest.mark.anyio

PARENT = """
import anyio, sys
from rollout_service.engines.kinds.embedded.process import EmbeddedEngine

async def main():
    async with EmbeddedEngine(sys.argv[1]) as engine:
        print(engine.pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("model") / "small")


async def until_gone(pid):
    with anyio.fail_after(20):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await anyio.sleep(0.05)


async def test_the_engine_ends_with_its_context(checkpoint):
    async with EmbeddedEngine(checkpoint, weight_version="4") as engine:
        backend = SGLangBackend(engine.url)
        assert (await backend.model_info()).weight_version == 4
        await backend.close()
    await until_gone(engine.pid)


async def test_a_web_page_cannot_use_an_engine(checkpoint):
    async with EmbeddedEngine(checkpoint) as engine, httpx.AsyncClient(base_url=engine.url) as http:
        rebound = await http.get("/model_info", headers={"host": "page.example"})
        foreign = await http.post("/continue_generation", headers={"origin": "https://page.example"})
        assert (rebound.status_code, foreign.status_code) == (421, 403)
        assert (await http.get("/model_info")).is_success
        assert (await http.post("/continue_generation")).is_success


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_web_page_flushes_no_cache_and_a_trainer_does_by_either_method(checkpoint, method):
    prompt = {"input_ids": list(range(1, 65)), "sampling_params": {"max_new_tokens": 1}}
    async with EmbeddedEngine(checkpoint) as engine, httpx.AsyncClient(base_url=engine.url) as http:

        async def cached() -> int:
            answer = await http.post("/generate", json=prompt)
            return answer.json()["meta_info"]["cached_tokens"]

        assert await cached() == 0
        kept = await cached()
        assert kept > 0
        for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://page.example"}):
            assert (await http.request(method, "/flush_cache", headers=headers)).status_code == 403
        assert await cached() == kept
        assert (await http.request(method, "/flush_cache")).is_success
        assert await cached() == 0


async def test_a_stopped_engine_is_ended_too(checkpoint):
    async with EmbeddedEngine(checkpoint) as engine:
        os.kill(engine.pid, signal.SIGSTOP)
    await until_gone(engine.pid)


async def test_the_engine_ends_when_its_parent_is_killed(checkpoint):
    async with await anyio.open_process([sys.executable, "-c", PARENT, checkpoint], stderr=None) as parent:
        pid = int(await parent.stdout.receive())
        assert psutil.pid_exists(pid)
        parent.kill()
    await until_gone(pid)


async def test_a_folder_without_a_model_says_so(tmp_path):
    with pytest.raises(EngineStartError, match=r"config\.json"):
        async with EmbeddedEngine(tmp_path):
            pass


@pytest.mark.parametrize("kind", [SGLangCpuServer, VllmCpuServer])
async def test_an_engine_that_is_not_installed_says_how(tmp_path, monkeypatch, checkpoint, kind):
    message = f"{kind.engine} is not installed in {tmp_path}; run {kind.installer}"
    with pytest.raises(EngineStartError, match=message):
        async with kind(checkpoint, env_dir=tmp_path):
            pass
    monkeypatch.setenv(kind.env_variable, str(tmp_path))
    with pytest.raises(EngineStartError, match=message):
        async with kind(checkpoint):
            pass


@pytest.fixture(scope="module")
def engine(checkpoint):
    server = EmbeddedEngine(checkpoint, kv_tokens=1500)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(server) as started:
        yield started


@pytest.mark.parametrize("interval", [1, 7, 100])
async def test_a_stream_has_each_token_once(engine, interval):
    body = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 30, "temperature": 0, "stream_interval": interval},
        "stream": True,
        "return_logprob": True,
    }
    events = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/generate", json=body) as answer,
    ):
        async for line in answer.content:
            if line.startswith(b"data: {"):
                events.append(orjson.loads(line[6:]))  # noqa: PERF401
    sent = 0
    for event in events:
        sent += len(event["output_ids"])
        assert event["meta_info"]["completion_tokens"] == sent
        logprobs = event["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in logprobs] == event["output_ids"]
    assert sent == 30
    assert all(len(event["output_ids"]) >= interval for event in events[:-1])
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text": "hello"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[1], [2]]}, "input_ids"),
        ({"input_ids": [1, 512]}, "512 is outside the vocabulary of 512"),
        ({"input_ids": [-1]}, "-1 is outside"),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k"),
        ({"input_ids": [1], "sampling_params": {"topk": 5}}, "topk"),
        ({"input_ids": [1], "sampling_params": {"repetition_penalty": 1.2}}, "repetition_penalty"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"input_ids": [1] * 1490, "sampling_params": {"max_new_tokens": 100}}, "context length"),
        ({"input_ids": [1], "return_logprob": True, "logprob_start_len": 1}, "logprob_start_len"),
    ],
)
async def test_an_unsupported_option_is_a_400_that_names_it(engine, body, message):
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/generate", json=body) as answer,
    ):
        assert answer.status == 400
        assert message in (await answer.json())["error"]["message"]


async def test_a_client_that_hangs_up_frees_its_place(engine):
    backend = SGLangBackend(engine.url)
    params = {"max_new_tokens": 1400, "temperature": 0}
    body = orjson.dumps({"rid": "gone", "input_ids": [1, 2], "sampling_params": params})
    reader_writer = await anyio.connect_tcp("127.0.0.1", int(engine.url.rpartition(":")[2]))
    async with reader_writer as stream:
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += b"Content-Length: %d\r\n\r\n"
        await stream.send(head % len(body) + body)
        while not (await backend.load()).running:
            await anyio.sleep(0.01)
    with anyio.fail_after(5):
        while (await backend.load()).running:
            await anyio.sleep(0.01)
    await backend.close()


async def test_ready_follows_the_pause(engine):
    async with aiohttp.ClientSession() as session:

        async def status(path):
            async with session.get(engine.url + path) as answer:
                return answer.status

        assert await status("/ready") == 200
        backend = SGLangBackend(engine.url)
        await backend.pause()
        assert (await status("/ready"), await status("/health")) == (503, 200)
        await backend.resume()
        assert await status("/ready") == 200
        await backend.close()
