"""An engine of a plug-in's kind is registered over HTTP and serves rollouts, also after a restart."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec, BackendState
from api_schemas.rollouts import RolloutRequest, RolloutState
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_client.errors import ClientError, InvalidRequestError
from rollout_service.cli.server_child import running_server
from rollout_service.engines.shipped import policy_folder
from rollout_service.testing import Replies, ScriptedEngine

pytestmark = pytest.mark.anyio

MODEL = policy_folder("calc-tuned")
PLUG_IN = """
from rollout_service.engines.kinds.sglang.backend import SGLangBackend

class Acme(SGLangBackend):
    pass
"""
ENTRY_POINTS = """
[rollout_service.engines]
acme = acme_engines:Acme
broken = acme_engines_that_are_not_there:Acme
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a plug-in with two kinds, of which one cannot be loaded; return a folder for the service."""
    installed = tmp_path / "plug-in"
    about = installed / "acme_engines-1.0.dist-info"
    about.mkdir(parents=True)
    (installed / "acme_engines.py").write_text(PLUG_IN)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-engines\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=":")
    (tmp_path / "service").mkdir()
    return tmp_path / "service"


def engine() -> ScriptedEngine:
    return ScriptedEngine(Replies.from_texts(["<|im_end|>"] * 4, MODEL), model_path=MODEL)


@asynccontextmanager
async def served(folder: Path, policy: ScriptedEngine) -> AsyncIterator[RolloutClient]:
    flags = ["--sandbox", "local", "--engine", "none", "--backend", policy.url]
    async with running_server(folder, flags) as client:
        yield client


def spec(url: str, kind: str) -> BackendSpec:
    return BackendSpec(url=HttpUrl(url), pool="acme", kind=kind)


async def kinds(client: RolloutClient) -> list[str]:
    return [view.kind for view in await client.backends() if view.state is BackendState.READY]


async def test_it_serves_rollouts_and_is_remembered(folder: Path) -> None:
    async with engine() as policy, engine() as acme:
        async with served(folder, policy) as client:
            assert (await client.add_backend(spec(acme.url, "acme"))).kind == "acme"
            instance = (await client.dataset("calc", limit=1))[0]
            task = Task(environment="calc", instance=instance)
            rollout = await client.run(RolloutRequest(task=task, pool="acme"))
            assert rollout.state is RolloutState.COMPLETED
        async with served(folder, policy) as client:
            with anyio.fail_after(30):
                while await kinds(client) != ["acme", "sglang"]:
                    await anyio.sleep(0.05)


async def test_what_cannot_be_used_is_refused_with_its_reason(folder: Path) -> None:
    async with engine() as policy, engine() as acme, served(folder, policy) as client:
        with pytest.raises(InvalidRequestError, match="no kind of engine 'acmee'; did you mean acme") as refused:
            await client.add_backend(spec(acme.url, "acmee"))
        assert [error.path for error in refused.value.problem.errors] == ["body.kind"]
        assert "Known kinds: acme, broken, sglang, vllm." in refused.value.problem.detail
        with pytest.raises(ClientError, match=r"the plug-in 'broken' .*No module named"):
            await client.add_backend(spec(acme.url, "broken"))
        assert await kinds(client) == ["sglang"]
        assert (await client.add_backend(spec(acme.url, "acme"))).kind == "acme"
