"""The keys of a store in a Redis, or in several, as files, and back.

Dumps have all keys as they were at one moment, although services write meanwhile. Keys are read one after the other,
Redis tells which of them change, and those are read again, the last ones while no Redis takes writes. That lasts for a
few milliseconds, however large the store is. Only keys with the store's prefix are read or written.

A dump begins with HEADER. A record is the lengths of a key and of its value (uint32 each, little-endian) and its time
to live in milliseconds (uint64, 0: without end), then the key without its prefix, then the value as Redis's DUMP writes
it; one without a value says that the key is gone. Of several records with one key, the last one counts.

Every function raises StoreError if a Redis fails or does not allow it, ConfigurationError if the password cannot be
read, and OSError if a file cannot be used.
"""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, Self

import redis

from rollout_service.base.errors import ConfigurationError, StoreError
from rollout_service.base.private_files import make_private
from rollout_service.store.redis.checks import RESTORING, execute, open_owner
from rollout_service.store.redis.config import RedisConfig
from rollout_service.store.redis.problems import explain

HEADER = b"rollout redis 1\n"
_RECORD = struct.Struct("<IIQ")
AT_ONCE = 128
FEW = 256
"""As many changed keys are read while Redis takes no writes."""
ROUNDS = 50
"""Limits how often changed keys are read before that, until few are left."""
PAUSE_SECONDS = 5.0
"""The longest time without writes, half of the time that services wait for an answer."""
_INVALIDATED = "__redis__:invalidate"
_META = "meta"
"""The key that services look at first."""
_LOADED = ":loaded"
"""Ends the name of that key until the end of a restore."""
ALWAYS = frozenset({_META, "segments:mark"})
"""Keys of a store that nothing was stored in."""
KINDS = {"r": "rollouts", "run": "runs"}
"""Counted kinds of keys, by the first parts of their names."""


def dump(stores: Sequence[tuple[RedisConfig, Path]], at_the_moment: Callable[[], None]) -> Counter[str]:
    """Write each shard to a file; return how many keys of each of `KINDS` there are.

    `at_the_moment` is called at the moment whose state the dumps have: no Redis takes writes until it returns.
    """
    with ExitStack() as stack:
        dumps = [stack.enter_context(_Dump.begun(config, path)) for config, path in stores]
        _write_most(dumps)
        with ExitStack() as paused:
            for one in dumps:
                paused.enter_context(one.without_writes())
            at_the_moment()
            for one in dumps:
                one.note_changes()
                for keys in one.take_changes():
                    one.write(keys)
        counts = Counter(dict.fromkeys(KINDS.values(), 0))
        for one in dumps:
            counts.update(one.counts())
        return counts


def _write_most(dumps: Sequence[_Dump]) -> None:
    for one in dumps:
        _write_parts(one, one.scan(), dumps)
    for _ in range(ROUNDS):
        for one in dumps:
            _write_parts(one, one.take_changes(), dumps)
        if all(one.changed <= FEW for one in dumps):
            return


def _write_parts(dump: _Dump, parts: Iterable[list[bytes]], dumps: Sequence[_Dump]) -> None:
    for keys in parts:
        dump.write(keys)
        # Redis cuts off listeners that leave too much unread, and clients that are silent.
        for other in dumps:
            other.note_changes()


def begin_restore(config: RedisConfig) -> None:
    """Keep services from using what is loaded, until `end_restore`."""
    remove(config)
    with _explained(config), closing(open_owner(config)) as client:
        execute(client, "HSET", f"{config.root}:{_META}", "application", RESTORING)


def end_restore(config: RedisConfig) -> None:
    meta = f"{config.root}:{_META}"
    with _explained(config), closing(open_owner(config)) as client:
        if execute(client, "EXISTS", f"{meta}{_LOADED}"):
            execute(client, "RENAME", f"{meta}{_LOADED}", meta)
        else:  # no service had begun the store
            execute(client, "UNLINK", meta)


def load(config: RedisConfig, path: Path) -> None:
    """Write a dump into a Redis that has nothing of the store, after `begin_restore`.

    Raises:
        ConfigurationError: The Redis is too old for the dump.
    """
    with _explained(config), closing(open_owner(config)) as client:
        records = _records(path)
        while some := list(islice(records, AT_ONCE)):
            pipeline = client.pipeline(transaction=False)
            for name, value, ttl in some:
                key = config.root.encode() + b":" + name
                if name == _META.encode():
                    key += _LOADED.encode()
                if value:
                    execute(pipeline, "RESTORE", key, ttl, value, "REPLACE")
                else:
                    execute(pipeline, "UNLINK", key)
            pipeline.execute()


def check_empty(config: RedisConfig) -> None:
    """
    Raises:
        ConfigurationError: The Redis has something of the store.
    """
    with _explained(config), closing(open_owner(config)) as client:
        prefix = config.root.encode() + b":"
        for keys in _scan(client, config):
            if any(key.removeprefix(prefix).decode() not in ALWAYS for key in keys):
                raise ConfigurationError(
                    f"the Redis at {config.address} has a store with the prefix {config.prefix!r}",
                    hint="Choose another [store] prefix, or another Redis. If nobody needs that store, stop its "
                    f"services and delete it: redis-cli --scan --pattern '{config.root}:*' | xargs redis-cli unlink",
                )


def remove(config: RedisConfig) -> None:
    with _explained(config), closing(open_owner(config)) as client:
        for keys in filter(None, _scan(client, config)):
            execute(client, "UNLINK", *keys)


class _Dump:
    """The dump of one Redis, to which keys are appended with their present values."""

    def __init__(
        self, config: RedisConfig, client: redis.Redis, changes: Callable[[], set[bytes]], file: IO[bytes]
    ) -> None:
        self._config = config
        self._client = client
        self._changes = changes
        self._file = file
        self._changed: set[bytes] = set()
        self._names: set[bytes] = set()
        file.write(HEADER)

    @classmethod
    @contextmanager
    def begun(cls, config: RedisConfig, path: Path) -> Iterator[Self]:
        """Begin a dump, and note all changes from now on."""
        path.parent.mkdir(mode=0o700, exist_ok=True)
        make_private(path)
        with (
            _explained(config),
            closing(open_owner(config)) as client,
            _changes(config, client) as changes,
            path.open("r+b") as file,
        ):
            yield cls(config, client, changes, file)

    @property
    def changed(self) -> int:
        return len(self._changed)

    def scan(self) -> Iterator[list[bytes]]:
        with _explained(self._config):
            yield from _scan(self._client, self._config)

    def note_changes(self) -> None:
        with _explained(self._config):
            execute(self._client, "PING")
            self._changed |= self._changes()

    def take_changes(self) -> Iterator[list[bytes]]:
        """Yield the keys that have changed, some at a time; they count as written again."""
        changed, self._changed = iter(self._changed), set()
        while some := list(islice(changed, AT_ONCE)):
            yield some

    def write(self, keys: Sequence[bytes]) -> None:
        """Append keys with their present values."""
        with _explained(self._config):
            pipeline = self._client.pipeline(transaction=True)  # a value and its time to live belong together
            for key in keys:
                execute(pipeline, "DUMP", key)
                execute(pipeline, "PTTL", key)
            answers = iter(pipeline.execute())
        prefix = self._config.root.encode() + b":"
        for key, value, ttl in zip(keys, answers, answers, strict=True):
            name = key.removeprefix(prefix)
            self._file.write(_RECORD.pack(len(name), len(value or b""), max(ttl, 0)) + name + (value or b""))
            if value is None:
                self._names.discard(name)
            else:
                self._names.add(name)

    @contextmanager
    def without_writes(self) -> Iterator[None]:
        """
        Raises:
            StoreError: The block took so long that there were some writes.
        """
        with _explained(self._config):
            execute(self._client, "CLIENT PAUSE", int(PAUSE_SECONDS * 1_000), "WRITE")
            began = time.monotonic()
            try:
                yield
            finally:
                execute(self._client, "CLIENT UNPAUSE")
            if time.monotonic() - began >= PAUSE_SECONDS:
                raise StoreError(
                    f"the Redis at {self._config.address} is too busy to be read within {PAUSE_SECONDS:g} s",
                    hint="Make the backup while less is written.",
                )

    def counts(self) -> Counter[str]:
        kinds = (KINDS.get(name.partition(b":")[0].decode()) for name in self._names)
        return Counter(kind for kind in kinds if kind is not None)


def _records(path: Path) -> Iterator[tuple[bytes, bytes, int]]:
    with path.open("rb") as file:
        if file.read(len(HEADER)) != HEADER:
            raise ConfigurationError(f"{path} is not a dump of a store", hint="Use another backup.")
        while header := file.read(_RECORD.size):
            name, value, ttl = _RECORD.unpack(header)
            yield file.read(name), file.read(value), ttl


def _scan(client: redis.Redis, config: RedisConfig) -> Iterator[list[bytes]]:
    """Yield the keys of the store, some at a time; one that is there all the time comes at least once."""
    cursor: Any = 0
    while True:
        cursor, keys = execute(client, "SCAN", cursor, "MATCH", f"{config.root}:*", "COUNT", AT_ONCE)
        yield keys
        if int(cursor) == 0:
            return


@contextmanager
def _changes(config: RedisConfig, client: redis.Redis) -> Iterator[Callable[[], set[bytes]]]:
    """Yield a function that returns the keys that were written since its last call."""
    with closing(open_owner(config)) as listener:
        number = execute(listener, "CLIENT ID")
        pubsub: Any = listener.pubsub()  # type: ignore[no-untyped-call]  # on the same connection: there is only one
        pubsub.subscribe(_INVALIDATED)
        execute(client, "CLIENT TRACKING", "ON", "REDIRECT", number, "BCAST", "PREFIX", f"{config.root}:")

        def changes() -> set[bytes]:
            pubsub.ping()  # Redis tells of all writes before it answers
            found: set[bytes] = set()
            while (message := pubsub.get_message(timeout=config.answer_seconds)) is not None:
                if message["type"] == "pong":
                    return found
                if message["type"] == "message":
                    if message["data"] is None:
                        raise StoreError("Redis was emptied during the backup", hint="Restore what it had.")
                    found.update(message["data"])
            raise StoreError(f"the Redis at {config.address} does not answer", hint="Try again.")

        with closing(pubsub):
            yield changes


@contextmanager
def _explained(config: RedisConfig) -> Iterator[None]:
    try:
        yield
    except redis.exceptions.NoPermissionError as error:
        raise StoreError(
            f"the Redis at {config.address} does not allow a backup: {error}",
            hint="Give the Redis user +client|id, +client|tracking, +client|pause, +client|unpause, the channel "
            f"{_INVALIDATED}, and all commands on the keys of the prefix (ACL SETUSER).",
        ) from error
    except redis.ResponseError as error:
        if "DUMP payload version" in str(error):
            raise ConfigurationError(
                f"the Redis at {config.address} is older than the one that the backup is of",
                hint="Restore to a Redis of the same version, or a newer one.",
            ) from error
        raise explain(error, config.address) from error
    except redis.RedisError as error:
        raise explain(error, config.address) from error
