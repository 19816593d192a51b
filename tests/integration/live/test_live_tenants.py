"""Clients, users and tenants are kept apart, whatever their names."""

from typing import Any

from rollout_service.live.contract import SessionRecord
from tests.support.gateway.service import scripted
from tests.support.live.service import LiveService, delivered, live_service, until

CHAT, VIP = "a-key-of-the-client-chat", "a-key-of-the-client-vip"


def keys(**fields: Any) -> list[dict[str, Any]]:
    """Return keys of two tenants, with names that could be taken for each other's."""
    return [
        {"name": "chat", "key": CHAT, "tenant": "a", "train": False} | fields,
        {"name": "chat:vip", "key": VIP, "tenant": "b", "train": True} | fields,
    ]


async def sessions(service: LiveService) -> dict[str, SessionRecord]:
    return {one.session_id: one for one in await service.store.sessions()}


async def say(service: LiveService, key: str, client_id: str, text: str) -> str:
    """Send a message; return whether it was recorded."""
    answer = await service.ask(key, text, headers={"X-Session-Id": client_id})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-rollout-recorded"]


async def test_keys_whose_names_and_ids_join_alike_share_no_session(tmp_path):
    engine = scripted(*["Hi."] * 4)
    async with engine as running, live_service(tmp_path, [running], live={"keys": keys()}) as service:
        for _ in range(2):
            await say(service, CHAT, "vip:x1", "of the tenant a")
            await say(service, VIP, "x1", "of the tenant b")
        found = await sessions(service)
        assert {name: (one.tenant, one.train, one.served) for name, one in found.items()} == {
            "chat:vip:x1": ("a", False, 2),
            "chat:vip:x1~2": ("b", True, 2),
        }
        assert len({one.user for one in found.values()}) == 2


async def test_a_clients_id_that_looks_like_a_later_session_is_another_client(tmp_path):
    live = {"keys": keys(), "idle_seconds": 0.3}
    async with scripted(*["Hi."] * 3) as engine, live_service(tmp_path, [engine], live=live) as service:
        await say(service, VIP, "u", "first")

        async def expired() -> bool:
            return (await sessions(service))["chat:vip:u"].closed_at is not None

        await until(expired)
        await say(service, VIP, "u", "second")
        await say(service, VIP, "u~2", "another")
        found = await sessions(service)
        assert found["chat:vip:u~2"].continues == "chat:vip:u"
        assert found["chat:vip:u~2~2"].continues is None
        assert found["chat:vip:u~2"].user == found["chat:vip:u"].user != found["chat:vip:u~2~2"].user


async def test_nobody_opens_a_clients_session_before_it_does(tmp_path):
    async with (
        scripted(*["Hi."] * 2) as engine,
        live_service(tmp_path, [engine], live={"keys": keys()}) as service,
    ):
        await service.open(session_id="chat:victim", train=True, tenant="evil")
        assert await say(service, CHAT, "victim", "not to be stored") == "no; reason=opted-out"
        found = await sessions(service)
        assert found["chat:victim"].served == 0
        assert (found["chat:victim~2"].tenant, found["chat:victim~2"].train) == ("a", False)


async def test_users_of_two_tenants_are_deleted_one_by_one(tmp_path):
    async with scripted(*["Hi."] * 2) as engine, live_service(tmp_path, [engine]) as service:
        opened = {tenant: await service.open(user="alice", tenant=tenant) for tenant in ("a", "b")}
        for one in opened.values():
            assert one.key is not None
            await service.ask(one.key, "words")
            await delivered(service, one.session.session_id, 1)
        refused = await service.http.delete("/v1/sessions", params={"user": "alice"})
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["path"] == "query.tenant"
        answer = await service.http.delete("/v1/sessions", params={"user": "alice", "tenant": "a"})
        assert answer.json()["sessions"] == 1
        left = await sessions(service)
        assert list(left) == [opened["b"].session.session_id]
        again = await service.http.delete("/v1/sessions", params={"user": "alice"})
        assert again.json()["sessions"] == 1, "only one tenant has a user of this name"


async def test_users_of_two_tenants_have_limits_of_their_own(tmp_path):
    live = {"requests_per_minute": 1, "quarantine_sessions": 1}
    async with scripted(*["Hi."] * 2) as engine, live_service(tmp_path, [engine], live=live) as service:
        for tenant in ("a", "b"):
            opened = await service.open(user="alice", tenant=tenant)
            assert opened.key is not None
            assert (await service.ask(opened.key, "words")).status_code == 200
            assert (await service.ask(opened.key, "words")).status_code == 429
        assert all(one.quarantined for one in (await sessions(service)).values())
