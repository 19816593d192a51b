"""A dump of a store in Redis is of one moment though others write, and touches no other store."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import redis

from rollout_service.backup import redis_dump
from rollout_service.base.errors import ConfigurationError, StoreError
from rollout_service.store.redis import RedisConfig
from rollout_service.store.redis.checks import StoreIdentity, connect
from tests.support.redis_server import RedisServer, redis_server

pytestmark = pytest.mark.redis

COUNTERS = 300


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as running:
        yield running


def write(server: RedisServer, config: RedisConfig, done: threading.Event) -> None:
    """Raise all counters together, and add and delete a key, again and again."""
    with server.client() as client:
        number = 0
        while not done.is_set():
            number += 1
            pipeline: Any = client.pipeline(transaction=True)
            for counter in range(COUNTERS):
                pipeline.set(f"{config.root}:c:{counter}", number)
            pipeline.set(f"{config.root}:new:{number}", "x")
            pipeline.delete(f"{config.root}:new:{number - 1}")
            pipeline.execute()


@contextmanager
def written(server: RedisServer, config: RedisConfig) -> Iterator[None]:
    done = threading.Event()
    writers = [threading.Thread(target=write, args=(server, config, done))]
    for writer in writers:
        writer.start()
    try:
        yield
    finally:
        done.set()
        for writer in writers:
            writer.join()


def test_a_dump_has_all_keys_as_they_were_at_one_moment(server, tmp_path):
    config = server.config("written")
    with server.client() as client:
        client.mset({f"{config.root}:r:{number}": "row" * 20 for number in range(20_000)})
    with written(server, config):
        at: list[Any] = []

        def look() -> None:
            with server.client() as client:
                at.append(client.get(f"{config.root}:c:0"))

        counts = redis_dump.dump([(config, tmp_path / "dump")], look)
    assert counts == {"rollouts": 20_000, "runs": 0}
    restored = server.config("restored")
    redis_dump.load(restored, tmp_path / "dump")
    with server.client() as client:
        counters = {client.get(f"{restored.root}:c:{counter}") for counter in range(COUNTERS)}
        assert counters == set(at), "the callback sees the moment"
        assert client.get(f"{restored.root}:r:19999") == b"row" * 20
        [new] = client.keys(f"{restored.root}:new:*")
        assert new.rpartition(b":")[2] == at[0]


def test_dumps_of_shards_are_of_one_moment(server, tmp_path):
    done = threading.Event()
    with redis_server() as other, server.client() as one, other.client() as two:
        configs = [server.config("shards"), other.config("shards")]
        for client in (one, two):
            client.mset({f"{configs[0].root}:r:{number}": "row" for number in range(2_000)})

        def write_in_turn() -> None:
            number = 0
            while not done.is_set():
                number += 1
                one.set(f"{configs[0].root}:c", number)
                two.set(f"{configs[1].root}:c", number)

        with ThreadPoolExecutor() as threads:
            writing = threads.submit(write_in_turn)
            try:
                dumps = [(config, tmp_path / str(number)) for number, config in enumerate(configs)]
                assert redis_dump.dump(dumps, lambda: None)["rollouts"] == 4_000
            finally:
                done.set()
            writing.result()
        restored = server.config("restored")
        found = []
        for _, path in dumps:
            redis_dump.load(restored, path)
            found.append(int(one.get(f"{restored.root}:c")))
    assert found[0] in (found[1], found[1] + 1)
    assert found[0] > 10, "much was written meanwhile"


def test_every_kind_of_key_comes_back_with_its_end(server, tmp_path):
    config, restored = server.config("kinds"), server.config("restored")
    with server.client() as client:
        root = config.root
        client.set(f"{root}:text", b"\x00\xff", px=500_000)
        client.hset(f"{root}:hash", mapping={"a": "1"})
        client.rpush(f"{root}:list", "a", "b")
        client.zadd(f"{root}:sorted", {"a": 1.5})
        client.sadd(f"{root}:set", "a")
        client.xadd(f"{root}:stream", {"a": "1"}, id="7-0")
        redis_dump.dump([(config, tmp_path / "dump")], lambda: None)
        redis_dump.load(restored, tmp_path / "dump")
        names = {key.partition(b":")[2] for key in client.keys(f"{restored.root}:*")}
        assert names == {b"text", b"hash", b"list", b"sorted", b"set", b"stream"}
        for name in names:
            old, new = (f"{each.root}:{name.decode()}" for each in (config, restored))
            assert client.dump(old) == client.dump(new)
        assert 0 < client.pttl(f"{restored.root}:text") <= 500_000
        assert client.pttl(f"{restored.root}:hash") == -1


def test_other_stores_are_left_alone_and_writes_go_on_after_a_failure(server, tmp_path):
    config, other = server.config("mine"), server.config("mine-too")
    with server.client() as client:
        client.set(f"{config.root}:r:1", "mine")
        client.set(f"{other.root}:r:1", "theirs")

        def fail() -> None:
            raise StoreError("the databases cannot be read")

        with pytest.raises(StoreError, match="cannot be read"):
            redis_dump.dump([(config, tmp_path / "dump")], fail)
        client.set(f"{config.root}:r:2", "mine")  # would wait for as long as Redis takes no writes
        redis_dump.dump([(config, tmp_path / "again")], lambda: None)
        redis_dump.remove(config)
        redis_dump.check_empty(config)
        assert client.get(f"{other.root}:r:1") == b"theirs"
        redis_dump.load(config, tmp_path / "again")
        assert client.keys(f"{config.root}:*")
        with pytest.raises(ConfigurationError, match="has a store") as caught:
            redis_dump.check_empty(config)
        assert caught.value.hint


def test_a_user_who_may_not_pause_redis_is_told_what_is_missing(server, tmp_path):
    (server.folder / "user").touch(0o600)
    (server.folder / "user").write_text("secret")
    server.do("ACL", "SETUSER", "backup", "on", ">secret", "~*", "&*", "+@all", "-client|pause")
    config = replace(
        server.config("acl"),
        url=server.url.replace("unix://", "unix://backup@"),
        password_file=server.folder / "user",
    )
    with pytest.raises(StoreError, match="does not allow a backup") as caught:
        redis_dump.dump([(config, tmp_path / "dump")], lambda: None)
    assert "+client|pause" in caught.value.hint


def test_a_dump_of_a_newer_redis_is_refused_with_what_to_do(server, tmp_path):
    config = server.config("newer")
    value = bytearray(server_dump(server))
    value[-10:-8] = (0xFFFF).to_bytes(2, "little")  # the version of the format
    record = redis_dump._RECORD.pack(1, len(value), 0) + b"k" + bytes(value)
    (tmp_path / "dump").write_bytes(redis_dump.HEADER + record)
    with pytest.raises(ConfigurationError, match="older than the one") as caught:
        redis_dump.load(config, tmp_path / "dump")
    assert "newer" in caught.value.hint


def server_dump(server: RedisServer) -> bytes:
    with server.client() as client:
        client.set("k", "v")
        value = client.dump("k")
        assert isinstance(value, bytes)
        return value


def test_a_store_that_is_restored_in_part_is_not_used(server, tmp_path):
    """The kernel may end a restore at any moment, and then nothing is undone."""
    config, restored = server.config("whole"), server.config("part")
    connect(config, StoreIdentity()).close()  # begins a store
    redis_dump.dump([(config, tmp_path / "dump")], lambda: None)
    redis_dump.begin_restore(restored)
    for _ in range(2):
        with pytest.raises(StoreError, match="that has not ended") as caught:
            connect(restored, StoreIdentity())
        assert "restore the backup again" in caught.value.hint
        redis_dump.load(restored, tmp_path / "dump")
    redis_dump.end_restore(restored)
    connect(restored, StoreIdentity()).close()
    with server.client() as client:
        assert client.hgetall(f"{restored.root}:meta") == client.hgetall(f"{config.root}:meta")
        assert not client.exists(f"{restored.root}:meta:loaded")


def test_a_redis_that_does_not_answer_is_an_error_of_the_store(server, tmp_path):
    config = server.config("gone")
    server.kill()
    with pytest.raises(StoreError, match="Redis") as caught:
        redis_dump.dump([(config, tmp_path / "dump")], lambda: None)
    assert caught.value.hint
    assert isinstance(caught.value.__cause__, redis.RedisError | StoreError | None)
