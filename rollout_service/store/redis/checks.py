"""A Redis is used only after it has been checked, and again after every lost connection.

It is Redis 7 or newer, a primary, durable unless the settings say otherwise, and evicts nothing; its keys under the
prefix are this program's, of this release's schema; it has this release's functions; and a durable one that has lost
everything, as with its files, is not used until the service starts again.

A function that connects raises ConfigurationError if the password cannot be read, StoreError if the Redis must not be
used, and redis.RedisError if it does not answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import redis
import structlog
from redis.backoff import NoBackoff
from redis.retry import Retry

from rollout_service.base.errors import StoreError
from rollout_service.store.redis.config import Durability, RedisConfig

log = structlog.get_logger(__name__)

FILES = ("common", "schema", "idle", "cluster", "engines", "segments", "index", "rollouts", "runs", "lists")
"""A file of `lua/` may use the tables of those before it."""
LIBRARY_NAMES = "rollouts_*"
"""The names of this program's libraries, of all releases."""
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class FunctionLibrary:
    """The functions that change the store, as one library: the files of `lua/`, each with one local table.

    A function runs to its end before any other command. The library and its functions are named by a digest of their
    text, so services of several releases use one Redis at once, each with its own functions.
    """

    name: str
    text: str
    suffix: str
    """Ends the names of its functions in Redis."""


def library_name(listed: Any) -> str:
    """Return the name of a library in the answer to FUNCTION LIST."""
    pairs = listed.items() if isinstance(listed, dict) else zip(listed[::2], listed[1::2], strict=True)
    return str(dict(pairs)[b"library_name"].decode())


@cache
def function_library() -> FunctionLibrary:
    folder = resources.files(__package__) / "lua"
    body = "\n".join((folder / f"{name}.lua").read_text() for name in FILES)
    digest = sha256(body.encode()).hexdigest()[:_DIGITS]
    name, suffix = f"rollouts_{digest}", f"_{digest}"
    return FunctionLibrary(name, f"#!lua name={name}\nlocal SUFFIX = '{suffix}'\n{body}", suffix)


APPLICATION = "rollout-service"
RESTORING = "rollout-service restore"
"""The application of a store to which a backup is being restored."""
_OLDEST = 7
"""Older versions have no functions."""
_DURABLE = {"appendonly": "yes", "appendfsync": "always"}
_ANYWAY = 'or accept that a crash of Redis loses work: [store] redis_durability = "relaxed"'


class ConnectionLostError(redis.ConnectionError):
    """The connection was lost before this command, which was not sent."""


class _OneConnection:
    """Sets up the first connection of a client, and refuses others, which redis-py's pool makes by itself."""

    def __init__(self) -> None:
        self._is_used = False

    def __call__(self, connection: Any) -> None:
        if self._is_used:
            raise ConnectionLostError("the connection was lost")
        self._is_used = True
        connection.on_connect()


@dataclass(slots=True)
class StoreIdentity:
    """Which store the Redis had when it was first checked, by its random id."""

    store: str | None = None
    nodes: Sequence[str] = ()
    """URLs of the cluster as last seen, to ask if that of the settings is gone."""

    def check(self, found: str, config: RedisConfig) -> None:
        """
        Raises:
            StoreError: It is another store than before.
        """
        if self.store is None or config.durability is Durability.RELAXED:
            self.store = found
        if self.store != found:
            raise _refusal(
                config,
                "has lost what this store had in it, or is another Redis",
                "Restore its files or a backup (`rollout-service restore`), or point [store] url to the right Redis. "
                "To begin with an empty store, delete store.json from [store] folder if you have one, and restart "
                "the services.",
            )


def connect(config: RedisConfig, identity: StoreIdentity) -> redis.Redis:
    """Return a checked connection that raises every failure at once."""
    client = open_owner(config, identity)
    try:
        _check(client, config, identity)
    except BaseException:
        client.close()
        raise
    return client


def open_client(config: RedisConfig, url: str | None = None) -> redis.Redis:
    """Return a client with one connection, which its first command makes; once lost, it is not made again.

    Its commands then raise ConnectionLostError before they are sent, so that nothing reaches a Redis unchecked.
    """
    options: dict[str, Any] = {"redis_connect_func": _OneConnection()}
    if (password := config.password()) is not None:
        options["password"] = password
    return redis.Redis.from_url(
        url or config.url,
        protocol=2,
        socket_timeout=config.answer_seconds,
        socket_connect_timeout=config.answer_seconds,
        retry=Retry(NoBackoff(), 0),
        client_name=APPLICATION,
        max_connections=1,
        **options,
    )


def open_owner(config: RedisConfig, identity: StoreIdentity | None = None) -> redis.Redis:
    """Return a client of the settings' Redis or, in a cluster, of the node that has the store's slot."""
    seeds = list(dict.fromkeys([config.url, *(identity.nodes if identity else ())]))
    for url in seeds[:-1]:
        with suppress(redis.RedisError, OSError):
            return _follow(config, url, identity)
    return _follow(config, seeds[-1], identity)


def _follow(config: RedisConfig, url: str, identity: StoreIdentity | None) -> redis.Redis:
    """Ask the node at this URL which node has the store's slot."""
    client = open_client(config, url)
    try:
        owner = _owner_url(client, config, url, identity)
    except BaseException:
        client.close()
        raise
    if owner is None:
        return client
    client.close()
    return open_client(config, owner)


def _owner_url(client: redis.Redis, config: RedisConfig, url: str, identity: StoreIdentity | None) -> str | None:
    """Return the URL of the node that has the store's slot; None if it is the client's."""
    if not execute(client, "INFO", "cluster").get("cluster_enabled"):
        return None
    slot = execute(client, "CLUSTER KEYSLOT", config.root)
    ranges = execute(client, "CLUSTER SLOTS")
    if identity is not None:
        identity.nodes = [_node_url(url, node) for _, _, *nodes in ranges for node in nodes]
    owner = next((nodes[0] for first, last, *nodes in ranges if first <= slot <= last), None)
    if owner is None:
        raise redis.exceptions.ClusterDownError(f"no node of the cluster has slot {slot}")
    return None if _text(execute(client, "CLUSTER MYID")) == _text(owner[2]) else _node_url(url, owner)


def _node_url(seed: str, node: Sequence[Any]) -> str:
    """Return the URL of a node of the seed's cluster; one that names no host is at the seed's."""
    parts = urlsplit(seed)
    user, at, _ = parts.netloc.rpartition("@")
    host = _text(node[0] or "") or parts.hostname or "127.0.0.1"
    place = f"[{host}]" if ":" in host else host
    scheme = "redis" if parts.scheme == "unix" else parts.scheme
    return urlunsplit((scheme, f"{user}{at}{place}:{node[1]}", "/0", parts.query, ""))


def warn_of_failover(client: redis.Redis, config: RedisConfig) -> None:
    """Warn if a failover to a replica can lose acknowledged writes."""
    replicas = execute(client, "INFO", "replication").get("connected_slaves", 0)
    if replicas and not config.replicas and config.durability is Durability.STRICT:
        log.warning(
            "a failover can lose what was acknowledged last, since no write waits for a replica",
            path=config.address,
            replicas=replicas,
            hint="Set [store] redis_replicas, and min-replicas-to-write in the Redis.",
        )


def execute(client: redis.Redis, *command: Any) -> Any:
    """Return redis-py's answer, in which texts are bytes."""
    return client.execute_command(*command)  # type: ignore[no-untyped-call]


def load(client: redis.Redis) -> None:
    """Load the library of this release, unless another service has."""
    try:
        execute(client, "FUNCTION LOAD", function_library().text)
    except redis.ResponseError as error:
        if "already exists" not in str(error):
            raise


def call_arguments(config: RedisConfig, name: str, now: float | None, *arguments: Any) -> tuple[Any, ...]:
    """Return the command that calls a function; `now` is in Unix seconds, None for Redis's clock."""
    clock = "" if now is None else repr(now)
    return ("FCALL", name + function_library().suffix, 1, config.root, clock, *arguments)


def _check(client: redis.Redis, config: RedisConfig, identity: StoreIdentity) -> None:
    info: dict[str, Any] = execute(client, "INFO", "everything")
    version = str(info.get("redis_version", "0"))
    if int(version.split(".")[0]) < _OLDEST:
        raise _refusal(config, f"is version {version}", f"Use Redis {_OLDEST} or newer.")
    if info.get("role") != "master":
        raise _refusal(config, "is a replica", "Point [store] url to the primary.")
    _check_settings(client, config, info)
    load(client)
    _check_schema(client, config)
    identity.check(store_id(client, config), config)


def _check_settings(client: redis.Redis, config: RedisConfig, info: dict[str, Any]) -> None:
    found = _settings(client, info)
    policy = found.get("maxmemory-policy", "noeviction")
    if policy != "noeviction" and found.get("maxmemory", "0") != "0":
        why = f"deletes keys when it is full: its maxmemory-policy is {policy}"
        raise _refusal(config, why, "Set maxmemory-policy noeviction.")
    if config.durability is Durability.RELAXED:
        return
    for name, needed in _DURABLE.items():
        if found.get(name) != needed:
            why = f"is not durable: its {name} is {found.get(name, 'unknown')}"
            raise _refusal(config, why, f"Set {name} {needed} (CONFIG SET, and in redis.conf), {_ANYWAY}.")


def _settings(client: redis.Redis, info: dict[str, Any]) -> dict[str, str]:
    """Return the server's settings; where CONFIG is not allowed, those that INFO has."""
    found: dict[str, str] = {}
    try:
        for name in (*_DURABLE, "maxmemory", "maxmemory-policy"):
            answer = execute(client, "CONFIG GET", name)
            found |= {_text(key): _text(value) for key, value in answer.items()}
    except redis.ResponseError:  # a managed Redis hides it
        found["appendonly"] = "yes" if info.get("aof_enabled") else "no"
        found["maxmemory"] = str(info.get("maxmemory", 0))
        found["maxmemory-policy"] = str(info.get("maxmemory_policy", "noeviction"))
    return found


def store_id(client: redis.Redis, config: RedisConfig) -> str:
    """Return a random id, empty if there is no store under the prefix."""
    found = execute(client, "HGET", f"{config.root}:segments:mark", "id")
    return "" if found is None else _text(found)


def _check_schema(client: redis.Redis, config: RedisConfig) -> None:
    part = (config.shard, config.shards, config.home)
    call = call_arguments(config, "schema_open", None, uuid4().hex, *part)
    application, version, supported, *found = execute(client, *call)
    if _text(application) == RESTORING:
        why = f"has a restore under the prefix {config.prefix!r} that has not ended"
        hint = "Wait for it. If it was cut off, delete the keys of this prefix, and restore the backup again."
        raise _refusal(config, why, hint)
    if _text(application) != APPLICATION:
        why = f"holds something of another program under the prefix {config.prefix!r}"
        raise _refusal(config, why, "Choose another [store] prefix.")
    if version != supported:
        why = f"has schema version {version}, but this release supports only {supported}"
        raise _refusal(config, why, "Run the release that wrote it, or choose another [store] prefix.")
    _check_shard(config, *map(_text, found))


def _check_shard(config: RedisConfig, shard: str, shards: str, home: str) -> None:
    """Refuse another number of shards, by which runs are found."""
    if (shard, shards) != (str(config.shard), str(config.shards)):
        why = f"has shard {shard} of {shards}, and by the settings it is shard {config.shard} of {config.shards}"
        hint = "Give [store] url and shards as they were when the store began, or choose another [store] prefix."
        raise _refusal(config, why, hint)
    if home != config.home:
        why = f"has shard {shard} of another store than the one at the first address"
        hint = "Give the addresses in [store] url that belong together, or choose another [store] prefix."
        raise _refusal(config, why, hint)


def _refusal(config: RedisConfig, why: str, hint: str) -> StoreError:
    return StoreError(f"the Redis at {config.address} {why}", hint=hint)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
