"""A key with the role `submit` may name files in the data folders, and an administrator any file."""

import httpx

from rollout_service.engines.shipped import policy_folder
from rollout_service.http.api_keys import ApiKey, Role
from rollout_service.server.api.app import create_app
from rollout_service.settings import Settings
from rollout_service.testing import Replies, ScriptedEngine
from sandboxes.config import LocalConfig

KEYS = {role: f"{role}-key-of-enough-characters" for role in (Role.SUBMIT, Role.ADMIN)}
MODEL = policy_folder("calc-tuned")


async def test_each_role_creates_runs_of_the_files_that_it_may_name(tmp_path):
    for folder in ("data", "elsewhere"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tasks.jsonl").write_text('{"question": "1 + 1", "answer": "2"}\n')
    keys = [ApiKey.model_validate({"name": role, "role": role, "key": key}) for role, key in KEYS.items()]
    settings = Settings(
        keys=keys,
        data_dirs=[tmp_path / "data"],
        state_dir=tmp_path / "state",
        engine="none",
        sandbox=LocalConfig(provider="local"),
    )
    app = create_app(settings)
    engine = ScriptedEngine(Replies.from_texts(["2"], MODEL), model_path=MODEL, vocab_size=512)
    async with (
        engine,
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):

        async def post(path: str, role: Role, body: object) -> httpx.Response:
            return await http.post(path, json=body, headers={"authorization": f"Bearer {KEYS[role]}"})

        assert (await post("/v1/backends", Role.ADMIN, {"url": engine.url})).status_code == 201
        created = {}
        for role in KEYS:
            for folder in ("data", "elsewhere"):
                path = str(tmp_path / folder / "tasks.jsonl")
                source = {"kind": "file", "path": path, "environment": "math"}
                order = {"source": source, "group_size": 1, "batch_size": 1, "filters": []}
                answer = await post("/v1/runs", role, order)
                created[role.value, folder] = answer.status_code
    assert created == {
        ("submit", "data"): 201,
        ("submit", "elsewhere"): 422,
        ("admin", "data"): 201,
        ("admin", "elsewhere"): 201,
    }
