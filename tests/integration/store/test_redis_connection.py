"""A store's connection to a real Redis: what is refused, with what to do, and what goes on after any outage."""

import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from rollout_service.base.errors import ServiceError, StoreError
from rollout_service.store.cluster_contract import NodeReport
from rollout_service.store.redis import Durability, RedisConfig, RedisConnection, RedisStore
from rollout_service.store.redis.checks import function_library, library_name
from rollout_service.store.retrying import retry_until_stored
from sandboxes.host.ports import free_port
from tests.support.api.server import make_certificate
from tests.support.redis_server import RedisServer, Tls, redis_server
from tests.support.waiting import until

pytestmark = pytest.mark.redis


@asynccontextmanager
async def opened(config: RedisConfig) -> AsyncIterator[RedisConnection]:
    connection = await RedisConnection.open(config)
    try:
        yield connection
    finally:
        await connection.close()


async def refused(config: RedisConfig) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        async with opened(config):
            raise AssertionError("it was opened")
    assert caught.value.hint
    return caught.value


async def test_services_share_a_redis_without_seeing_each_others_keys(shared_redis):
    async with opened(shared_redis.config()) as one, opened(shared_redis.config()) as other:
        assert one.key("x") != other.key("x")
        assert await one.command("EXISTS", one.key("meta"), other.key("meta")) == 2
        assert (one.problem, one.errors) == (None, 0)
        assert one.size_bytes() > 0


async def test_calls_made_together_are_answered_in_order(shared_redis):
    async with opened(shared_redis.config()) as connection:
        answers: dict[int, bytes] = {}

        async def echo(number: int) -> None:
            answers[number] = await connection.command("ECHO", number)

        async with anyio.create_task_group() as tasks:
            for number in range(1_000):
                tasks.start_soon(echo, number)
    assert answers == {number: str(number).encode() for number in range(1_000)}


async def test_functions_that_redis_has_lost_are_loaded_again(own_redis):
    async with opened(own_redis.config()) as connection:
        own_redis.do("FUNCTION", "FLUSH")
        assert (await connection.call("schema_open"))[0] == b"rollout-service"
        assert connection.errors == 0


async def test_a_wrong_call_is_a_defect_and_harms_no_other(shared_redis):
    async with opened(shared_redis.config()) as connection:
        with pytest.raises(ServiceError) as caught:
            await connection.command("HGETALL")
        assert caught.value.code == "internal_error"
        assert await connection.command("PING")


@pytest.mark.parametrize("setting", ["appendonly", "appendfsync"])
async def test_a_redis_that_is_not_durable_is_refused_unless_asked_for(setting):
    value = {"appendonly": "no", "appendfsync": "everysec"}[setting]
    with redis_server(options={setting: value}) as server:
        error = await refused(server.config())
        assert setting in str(error)
        assert "redis_durability" in error.hint
        async with opened(server.config(durability=Durability.RELAXED)):
            pass


async def test_a_redis_that_evicts_keys_is_refused():
    options = {"maxmemory": "100mb", "maxmemory-policy": "allkeys-lru"}
    with redis_server(options=options) as server:
        assert "maxmemory-policy" in str(await refused(server.config()))


async def test_a_replica_is_refused(own_redis):
    own_redis.do("REPLICAOF", "127.0.0.1", free_port())
    assert "replica" in str(await refused(own_redis.config()))


async def test_another_schema_and_another_programs_keys_are_refused(own_redis):
    config = own_redis.config("another")
    async with opened(config) as connection:
        key = connection.key("meta")
    for version in ("0", "99"):
        own_redis.do("HSET", key, "version", version)
        error = await refused(config)
        assert f"schema version {version}" in str(error)
        assert "release that wrote it" in error.hint
        assert own_redis.do("HGET", key, "version") == version.encode()
    for number, command in enumerate((("SET", "x"), ("HSET", "application", "shop"), ("SADD", "x"))):
        other = own_redis.config(f"other{number}")
        own_redis.do(command[0], f"{other.root}:meta", *command[1:])
        assert "another program" in str(await refused(other))


async def test_what_cannot_be_reached_is_refused_with_what_to_do(tmp_path):
    nothing = RedisConfig(f"redis://127.0.0.1:{free_port()}/0", answer_seconds=2)
    assert isinstance(await refused(nothing), StoreError)
    assert isinstance(await refused(RedisConfig(f"unix://{tmp_path}/no.sock")), StoreError)
    unreadable = replace(nothing, password_file=tmp_path / "none")
    assert "password" in str(await refused(unreadable))


async def test_another_program_on_the_port_is_refused():
    async def greet(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, greet)
        error = await refused(RedisConfig(f"redis://127.0.0.1:{port}/0"))
        tasks.cancel_scope.cancel()
    assert "Another program" in error.hint


async def test_a_password_is_needed_and_never_shown(tmp_path):
    with redis_server(port=free_port(), password="right-and-long") as server:
        async with opened(server.config()) as connection:
            assert await connection.command("PING")
        wrong = tmp_path / "wrong"
        wrong.write_text("quite-wrong")
        wrong.chmod(0o644)
        assert "chmod 600" in (await refused(RedisConfig(server.url, password_file=wrong))).hint
        wrong.chmod(0o600)
        for config in (RedisConfig(server.url), RedisConfig(server.url, password_file=wrong)):
            error = await refused(config)
            assert "password_file" in error.hint
            assert "quite-wrong" not in str(error)


async def test_tls_is_spoken_and_its_certificate_checked(tmp_path):
    certificate, key = make_certificate(tmp_path)
    with redis_server(port=free_port(), tls=Tls(certificate, key, certificate)) as server:
        async with opened(server.config()) as connection:
            assert await connection.command("PING")
        unknown = RedisConfig(server.url.partition("?")[0])
        assert isinstance((await refused(unknown)).__cause__, Exception)
        assert ssl.OPENSSL_VERSION


async def test_it_goes_on_after_redis_crashed(own_redis):
    async with opened(own_redis.config()) as connection:
        await connection.call("schema_open")
        own_redis.kill()
        with pytest.raises(StoreError) as caught:
            await connection.call("schema_open")
        assert "Start Redis" in caught.value.hint
        assert connection.problem is not None
        own_redis.start()
        assert (await connection.call("schema_open"))[0] == b"rollout-service"
        await until_well(connection)


async def until_well(connection: RedisConnection) -> None:
    """Wait until its reader has connected again by itself."""
    await until(lambda: connection.problem is None)


@pytest.mark.parametrize("durability", list(Durability))
async def test_a_durable_redis_that_has_lost_everything_is_not_used(own_redis, durability):
    config = own_redis.config("lost", durability=durability)
    async with opened(config) as connection:
        own_redis.kill()
        shutil.rmtree(own_redis.folder / "appendonlydir")
        own_redis.start()
        if durability is Durability.RELAXED:
            await retry_until_stored("open", lambda: connection.call("schema_open"))
            return
        for _ in range(2):
            with pytest.raises(StoreError, match="has lost what this store had"):
                await connection.call("schema_open")
        assert connection.problem is not None
    async with opened(config) as connection:
        assert await connection.call("schema_open")


async def test_a_redis_that_was_emptied_while_it_is_used_is_noticed(own_redis, monkeypatch):
    monkeypatch.setattr("rollout_service.store.redis.connection.LOOK_SECONDS", 0.0)
    async with opened(own_redis.config()) as connection:
        own_redis.do("FLUSHALL")
        with pytest.raises(StoreError, match="has lost what this store had"):
            await connection.call("schema_open")
        assert "has lost what this store had" in str(connection.problem)


async def test_it_goes_on_after_redis_stood_still(own_redis):
    async with opened(own_redis.config(answer_seconds=3.0)) as connection:
        with own_redis.paused():
            with pytest.raises(StoreError) as caught:
                await connection.command("PING")
            assert "slow" in caught.value.hint
            assert connection.problem is not None
        assert await connection.command("PING")
        await until_well(connection)


async def test_it_goes_on_after_redis_was_read_only(own_redis):
    async with opened(own_redis.config()) as connection:
        await connection.call("schema_open")
        own_redis.do("REPLICAOF", "127.0.0.1", free_port())
        for _ in range(2):
            with pytest.raises(StoreError, match=r"(?i)replica"):
                await connection.call("schema_open")
        own_redis.do("REPLICAOF", "NO", "ONE")
        assert await connection.call("schema_open")


def publish(server: RedisServer, connection: RedisConnection, topic: str, message: str) -> int:
    """Publish a message; return how many connections are told."""
    return int(server.do("SPUBLISH", connection.key(f"topic:{topic}"), message))


async def test_listeners_are_told_of_every_message_and_to_look_anew_after_a_crash(own_redis):
    async with opened(own_redis.config()) as connection:
        told: list[bytes | None] = []
        connection.topics.listen("x", told.append)
        await connection.topics.confirmed("x")
        for number in range(5):
            assert publish(own_redis, connection, "x", str(number)) == 1
        await until(lambda: len(told) == 6)
        own_redis.kill()
        own_redis.start()
        await until(lambda: len(told) == 7)
        publish(own_redis, connection, "x", "5")
        await until(lambda: told == [None, b"0", b"1", b"2", b"3", b"4", None, b"5"])


async def test_a_topic_is_followed_only_while_somebody_waits(own_redis, monkeypatch):
    monkeypatch.setattr("rollout_service.store.redis.topics.LINGER_SECONDS", 0.0)
    async with opened(own_redis.config()) as connection:
        assert publish(own_redis, connection, "x", "1") == 0
        async with connection.topics.watching("x") as changes, connection.topics.watching("x"):
            seen = changes.value
            assert publish(own_redis, connection, "x", "1") == 1
            await changes.wait_above(seen)
        await until(lambda: publish(own_redis, connection, "x", "1") == 0)
        async with connection.topics.watching("x") as changes:
            assert changes.value > seen, "something may have been missed"


async def test_topics_that_come_and_go_while_redis_is_away_are_followed_after_it(own_redis, monkeypatch):
    monkeypatch.setattr("rollout_service.store.redis.topics.CONFIRM_SECONDS", 0.0)
    monkeypatch.setattr("rollout_service.store.redis.topics.LINGER_SECONDS", 0.0)
    async with opened(own_redis.config()) as connection:
        own_redis.kill()
        async with connection.topics.watching("gone"):
            pass
        async with connection.topics.watching("kept") as changes:
            seen = changes.value
            own_redis.start()
            await until(lambda: changes.value > seen)
            assert publish(own_redis, connection, "kept", "1") == 1
            assert publish(own_redis, connection, "gone", "1") == 0


async def test_a_closed_connection_says_so_and_closes_at_once(shared_redis):
    connection = await RedisConnection.open(shared_redis.config())
    with anyio.fail_after(1):
        await connection.close()
        await connection.close()
    with pytest.raises(StoreError, match="closed"):
        await connection.call("schema_open")


async def test_functions_of_other_releases_go_once_no_node_calls_them(own_redis):
    config = own_redis.config("upgrade")
    async with await RedisStore.open(config, is_gone=lambda _: False) as store:
        own = function_library().name
        for name in ("rollouts_0ld", "rollouts_used", "shop"):
            own_redis.do(
                "FUNCTION",
                "LOAD",
                f"#!lua name={name}\nredis.register_function('{name}', function() return 1 end)",
            )
        for name in ("new", "old"):
            await store.cluster.join(NodeReport(name, name))
        own_redis.do("HSET", f"{config.root}:node:old", "library", "rollouts_used")
        await store.collect_garbage()
        assert libraries(own_redis) == {own, "rollouts_used", "shop"}
        await store.cluster.leave("old")
        await store.collect_garbage()
        assert libraries(own_redis) == {own, "rollouts_used", "shop"}, "it looks only now and then"
        assert await store.cluster.delete_unused_libraries() == 1
        assert libraries(own_redis) == {own, "shop"}
        await store.connection.delete_library("rollouts_used")  # another service was faster
        await store.connection.delete_library(own)
        assert [node.report.name for node in await store.cluster.nodes()] == ["new"], "it is loaded again"


def libraries(server: RedisServer) -> set[str]:
    return {library_name(listed) for listed in server.do("FUNCTION", "LIST")}
