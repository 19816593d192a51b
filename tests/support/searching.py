"""Finds a text in all that stores keep: in each value as it is, and in what is compressed there."""

import base64
import binascii
import re
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import zstandard

from rollout_service.store.redis import RedisConfig
from tests.support.redis_server import RedisServer

ZSTD = b"\x28\xb5\x2f\xfd"
ZLIB = b"\x78\x01"
BASE64 = re.compile(rb"KLUv[A-Za-z0-9+/=]{8,}")
"""Base64 of what begins as Zstandard does."""
DEPTH = 4
MIN_TRACE = 24
"""The bytes of a compressed value that are looked for in a file: enough that nothing else has them."""


def unpacked(value: bytes, depth: int = DEPTH) -> Iterator[bytes]:
    """Yield a value, and what is compressed anywhere in it."""
    yield value
    if not depth:
        return
    for found in BASE64.finditer(value):
        try:
            inner = base64.b64decode(found[0])
        except binascii.Error:
            continue
        yield from unpacked(inner, depth - 1)
    for mark, opener in ((ZSTD, zstandard.ZstdDecompressor().decompressobj), (ZLIB, zlib.decompressobj)):
        at = value.find(mark)
        while at >= 0:
            try:
                inner = opener().decompress(value[at:])
            except (zlib.error, zstandard.ZstdError):
                inner = b""
            if inner:
                yield from unpacked(inner, depth - 1)
            at = value.find(mark, at + 1)


def holding(values: Iterable[bytes], text: bytes) -> list[bytes]:
    """Return the values that contain a text, compressed or not."""
    return [value for value in values if any(text in inner for inner in unpacked(value))]


def traces(values: Sequence[bytes], text: bytes) -> list[bytes]:
    """Return bytes of the values that contain a text, which no other value has, to be looked for in files."""
    found = holding(values, text)
    others = [value for value in values if value not in found]
    windows = {value[at : at + MIN_TRACE] for value in found for at in range(0, len(value) - MIN_TRACE + 1, MIN_TRACE)}
    return [window for window in windows if not any(window in other for other in others)]


def sqlite_values(path: Path) -> list[bytes]:
    """Return the values of all rows of a database, which a service may have open."""
    values: list[bytes] = []
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
        tables = db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()
        for (table,) in tables:
            for row in db.execute(f'SELECT * FROM "{table}"'):
                values += [_as_bytes(value) for value in row if isinstance(value, bytes | str)]
    db.close()
    return values


def redis_values(server: RedisServer, config: RedisConfig) -> list[bytes]:
    """Return all keys of a store, and their values, with the members of those that have several."""
    values: list[bytes] = []
    with server.owner(config).client() as client:
        for key in client.scan_iter(f"*{config.prefix}*"):
            values.append(key)
            match client.type(key):
                case b"string":
                    values.append(client.get(key) or b"")
                case b"hash":
                    values += [part for pair in client.hgetall(key).items() for part in pair]
                case b"list":
                    values += client.lrange(key, 0, -1)
                case b"set":
                    values += client.smembers(key)
                case b"zset":
                    values += client.zrange(key, 0, -1)
                case b"stream":
                    values += [part for _, entry in client.xrange(key) for pair in entry.items() for part in pair]
                case other:
                    raise AssertionError(f"{key!r} is a {other!r}")
    return values


def _as_bytes(value: bytes | str) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
