"""An environment.toml of the kind `openenv` fixes the address; instances bring the arguments of a reset."""

import json
from pathlib import Path

import aiohttp
import anyio
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollout_service.base.errors import ConfigurationError, InvalidFieldError
from rollout_service.environments.bridges import openenv_session
from rollout_service.environments.bridges.openenv import OpenEnv, OpenEnvDeclaration, load_openenv
from rollout_service.environments.bridges.openenv_session import OpenEnvServer, OpenEnvSession
from rollout_service.environments.registry import load_declared

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "how-to" / "bridge-openenv.md").read_text()
URL = 'url = "http://127.0.0.1:8000"\n'


def write(folder: Path, text: str) -> Path:
    (folder / "environment.toml").write_text(f'kind = "openenv"\nname = "served"\n{text}')
    return folder


def test_the_example_of_the_page_loads_with_its_data_set(tmp_path):
    toml, row = (PAGE.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("toml", "json"))
    (tmp_path / "environment.toml").write_text(toml)
    (tmp_path / "tasks.jsonl").write_text(row)
    environment = load_declared(tmp_path)
    assert isinstance(environment, OpenEnv)
    (instance,) = environment.dataset()
    environment.check(instance)
    assert environment.replayable == "never"


def test_every_key_is_on_the_page():
    for name in OpenEnvDeclaration.model_fields:
        assert f"`{name}`" in PAGE or f"`[{name}]`" in PAGE or f"`{name}`, " in PAGE or name in ("kind", "description")


def test_what_the_api_shows_has_neither_the_address_nor_the_headers(tmp_path):
    folder = write(tmp_path, URL + 'headers = {Authorization = "Bearer secret"}')
    shown = load_openenv(folder).spec.model_dump_json()
    assert "secret" not in shown
    assert "8000" not in shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the key url is missing"),
        ('url = "file:///etc/passwd"', "url: String should match pattern"),
        ('url = "http://user:password@host"', "url: String should match pattern"),
        ('url = "http://host/?x=1"', "url: String should match pattern"),
        (URL + "sessions = 0", "sessions: Input should be greater than or equal to 1"),
        (URL + 'text_field = "message"\ntool = "say"', "give either `text_field` or `tool`"),
        (URL + 'tool = "a tool"', "tool: String should match pattern"),
        (URL + 'textfield = "message"', "there is no key textfield; did you mean text_field"),
        (URL + 'prompt = "{{ instance.question"', "the prompt of 'served'"),
        (URL + '[dataset]\npath = "none.jsonl"', "none.jsonl"),
    ],
)
def test_a_wrong_key_is_named(tmp_path, text, why):
    with pytest.raises(ConfigurationError) as caught:
        load_openenv(write(tmp_path, text))
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("instance", "path"),
    [
        ({"seed": "x"}, "instance.seed"),
        ({"options": 3}, "instance.options"),
        ({"options": {"seed": 3}}, "instance.options"),
        ({}, "instance.level"),
    ],
)
def test_an_instance_that_cannot_be_used_is_refused(tmp_path, instance, path):
    environment = load_openenv(write(tmp_path, URL + 'prompt = "Level {{ instance.level }}."'))
    environment.check({"level": 1, "seed": 2, "options": {"size": 3}})
    with pytest.raises(InvalidFieldError) as caught:
        environment.check({"level": 1, **instance} if instance else instance)
    assert [field.path for field in caught.value.fields] == [path]


async def test_an_action_may_have_any_whole_number():
    sent = []

    class Socket:
        async def send_str(self, text):
            sent.append(json.loads(text))

    arrived, answers = anyio.create_memory_object_stream[str](1)
    with arrived, answers:
        await arrived.send('{"type": "observation", "data": {"observation": {}, "reward": 1}}')
        observed = await OpenEnvSession("http://a", Socket(), answers).step({"n": 10**30}, 5.0)
    assert observed.reward == 1.0
    assert sent == [{"type": "step", "data": {"n": 10**30}}]


async def test_an_idle_session_is_kept_alive_by_pings(monkeypatch):
    monkeypatch.setattr(openenv_session, "PING_SECONDS", 0.01, raising=False)
    seen = anyio.Event()

    async def listen(request):
        socket = web.WebSocketResponse(autoping=False)
        await socket.prepare(request)
        while (message := await socket.receive()).type is not aiohttp.WSMsgType.TEXT:
            if message.type is aiohttp.WSMsgType.PING:
                seen.set()
        return socket

    app = web.Application()
    app.router.add_get("/ws", listen)
    async with TestServer(app) as server, OpenEnvServer(str(server.make_url("/")), {}).session():
        with anyio.fail_after(20):
            await seen.wait()
