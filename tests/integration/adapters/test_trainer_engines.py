"""The engines of a trainer serve its rollouts while it runs, and are gone with it, with the trainer's versions."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from tokenizers import Tokenizer

from rollout_client import SyncRolloutClient
from rollout_client.adapters import slime
from rollout_client.adapters.areal import Episodes
from rollout_client.adapters.engines import TrainerEngines
from rollout_client.adapters.openrlhf import Executor
from rollout_client.adapters.submit import RolloutSubmitter, run_in_order
from rollout_service.engines.shipped import policy_folder
from tests.support.adapters import async_engine
from tests.support.api.server import api_server
from tests.support.processes.service import eventually, scripted_engine
from tests.support.turns import called, turn_of
from tests.support.web_server import Answer, Asked, web_server

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[3]
ANSWER = r"It is \boxed{4}.<|im_end|>"
SLEEP = turn_of(called("python", code="import time; time.sleep(600)"))
ROW = {"environment": "math", "instance": {"question": "2 + 2", "answer": "4"}}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Yield the URLs of a service without engines, and of two engines that it does not know."""
    folder = tmp_path_factory.mktemp("engines")
    with (
        scripted_engine(folder, ANSWER, name="one") as one,
        scripted_engine(folder, ANSWER, name="two") as two,
        api_server(folder) as server,
    ):
        yield server.url, [one.url, two.url]


@dataclass
class Remote:
    """The part of AReaL's engine that the adapter reads."""

    addresses: list[str]
    version: int = 0

    def get_version(self) -> int:
        return self.version


@pytest.mark.torch
async def test_rollouts_use_the_trainers_engines_and_have_its_versions(started) -> None:
    url, addresses = started
    episodes = Episodes(url=url)
    remote = Remote([one.removeprefix("http://") for one in addresses])
    with SyncRolloutClient(url) as client:
        for remote.version in (0, 5, 6):
            row = await episodes.arun_episode(remote, ROW)
            assert set(row["versions"].flatten().tolist()) == {-1, remote.version}
        (pool,) = {one.pool for one in client.backends()}
        assert pool.startswith("areal-")
        assert sorted(one.url for one in client.backends()) == sorted(addresses)
        remote.addresses.pop()  # as AReaL does with an engine that is gone
        await episodes.arun_episode(remote, ROW)
        assert len(client.backends()) == 1
        await anyio.to_thread.run_sync(episodes.engines.close)
        assert client.backends() == []
        await episodes.arun_episode(remote, ROW)
        assert len(client.backends()) == 1, "after a close they are registered again"
        await anyio.to_thread.run_sync(episodes.engines.close)
    await episodes.engines.submitter.aclose()


async def test_a_process_that_is_behind_does_not_turn_the_version_back(started) -> None:
    url, addresses = started
    ahead, behind = (TrainerEngines("areal", RolloutSubmitter(url)) for _ in range(2))
    for version in (1, 2):
        await behind.follow(addresses, 1)
        await ahead.follow(addresses, version)
    await behind.follow(addresses, 2)
    await ahead.follow(addresses, 4)
    await behind.follow(addresses, 3)
    with SyncRolloutClient(url) as client:
        assert [one.weight_version for one in client.backends()] == [4, 4]
    for each in (ahead, behind):
        await anyio.to_thread.run_sync(each.close)


async def test_an_engine_that_the_service_lost_is_registered_again(started) -> None:
    url, addresses = started
    engines = TrainerEngines("areal", RolloutSubmitter(url), lease_seconds=3)
    await engines.follow(addresses[:1], 8)
    with SyncRolloutClient(url) as client:
        client.remove_backend(client.backends()[0].backend_id)
        eventually(lambda: [one.weight_version for one in client.backends()] == [8])
    await anyio.to_thread.run_sync(engines.close)


def test_a_trainer_that_is_killed_leaves_no_engine_and_no_rollout(started, tmp_path) -> None:
    url, _ = started
    program = """if True:
        import asyncio, json, sys
        from rollout_client.adapters.engines import TrainerEngines
        from rollout_client.adapters.submit import RolloutSubmitter

        async def main(url, engine, row):
            engines = TrainerEngines("areal", RolloutSubmitter(url), lease_seconds=2)
            submitter = await engines.follow([engine], 3)
            await submitter.run(submitter.request(row))

        asyncio.run(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
    """
    row = {"environment": "calc", "instance": {"question": "1+1", "answer": 2}}
    with scripted_engine(tmp_path, SLEEP) as engine, SyncRolloutClient(url) as client:
        command = [sys.executable, "-c", program, url, engine.url, json.dumps(row)]
        with subprocess.Popen(command) as trainer:
            eventually(lambda: sum(one.served for one in client.backends()) > 1)  # the tool sleeps
            trainer.kill()
        eventually(lambda: client.backends() == [])
        eventually(lambda: [one.environment for one in client.summaries(states=["cancelled"])] == ["calc"])


@pytest.mark.parametrize("is_old", [False, True])
async def test_slimes_router_names_the_engines(started, monkeypatch, is_old) -> None:
    url, addresses = started

    def answer(asked: Asked) -> Answer:
        new = {"workers": [{"id": one, "url": one} for one in addresses]}
        known = {"/list_workers": {"urls": addresses}} if is_old else {"/workers": new}
        return 200 if asked.path in known else 404, {}, json.dumps(known.get(asked.path, {})).encode()

    monkeypatch.setenv("ROLLOUT_URL", url)
    slime.engines.cache_clear()
    with web_server(answer) as router:
        args = SimpleNamespace(sglang_router_ip="127.0.0.1", sglang_router_port=int(router.partition(":")[2]))
        try:
            found = await run_in_order([partial(slime.submitter_for, args)] * 8)
            (pool,) = {one.pool for one in found}  # none went without the engines while the router was asked
            submitter = found[0]
            assert pool.startswith("slime-")
            with SyncRolloutClient(url) as client:
                assert {one.pool for one in client.backends()} == {submitter.pool}
                assert len(client.backends()) == 2
        finally:
            await anyio.to_thread.run_sync(slime.engines().close)
            slime.engines.cache_clear()


async def test_an_engine_without_http_serves_the_rollouts_of_openrlhfs_actor(started, monkeypatch) -> None:
    url, _ = started
    async_engine.install(monkeypatch)
    model = str(policy_folder("calc-base"))
    tokens = Tokenizer.from_file(f"{model}/tokenizer.json").encode(ANSWER, add_special_tokens=False).ids
    vllm = async_engine.FakeEngine(tokens, async_engine.ModelConfig(model, model))
    executor = Executor(RolloutSubmitter(url))
    params = SimpleNamespace(temperature=1.0, max_tokens=len(tokens) + 1)
    try:
        with SyncRolloutClient(url) as client:
            for version in (0, 1):
                answer = await executor.execute(ROW, None, params, 1_000, None, SimpleNamespace(llm=vllm))
                assert answer["observation_tokens"][-len(tokens) :] == tokens
                assert answer["rollout_log_probs"][-len(tokens) :] == [async_engine.LOGPROB] * len(tokens)
                assert answer["reward"] == 1.0
                (backend,) = client.backends()
                assert backend.weight_version == version
                await vllm.collective_rpc("update_weight", args=("w", "float32", (1,), True))
            assert client.backends()[0].weight_version == 2
            assert backend.pool.startswith("openrlhf-")
            await anyio.to_thread.run_sync(executor.engines.close)
            assert client.backends() == []
        assert vllm.unfinished == {}
    finally:
        await executor.engines.submitter.aclose()
        await async_engine.stop(executor._server)


@pytest.mark.trainers
@pytest.mark.slow(seconds=60)
@pytest.mark.timeout(400)
def test_verls_load_balancer_names_the_engines_and_its_servers_the_step(started) -> None:
    url, addresses = started
    done = subprocess.run(
        [
            ROOT / ".venv-trainers" / "bin" / "python",
            ROOT / "tests/support/adapters/verl_engines.py",
            addresses[0],
        ],
        env=os.environ | {"ROLLOUT_URL": url, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["steps"] == [[7, 7], [8, 8]]
    assert [pool.startswith("verl-") for pool in figures["pools"]] == [True]
    assert (figures["left"], figures["in_flight"]) == (0, 0)
