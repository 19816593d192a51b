"""The address of a store's Redis, and the store's demands on it.

A password is never part of an error, a log line or a representation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from rollout_service.base.errors import ConfigurationError
from rollout_service.base.private_files import OTHERS
from rollout_service.settings import StoreSettings


class Durability(StrEnum):
    STRICT = "strict"
    """Every write is on Redis's disk before it is acknowledged."""
    RELAXED = "relaxed"
    """A crash of Redis may lose acknowledged writes."""


@dataclass(frozen=True, slots=True)
class RedisConfig:
    url: str
    """`redis://`, `rediss://` or `unix://`, as redis-py reads it."""
    prefix: str = "rollouts"
    """The name that the keys of all services with the same work begin with."""
    password_file: Path | None = None
    """The file with the password, which is read again for every new connection."""
    durability: Durability = Durability.STRICT
    replicas: int = 0
    """Replicas that must have a write before it is acknowledged."""
    answer_seconds: float = 10.0
    """How long Redis may take to accept a connection or to answer."""
    shard: int = 0
    """Which part of the store this is, from 0."""
    shards: int = 1
    home: str = ""
    """The id of the store's first shard, which the others keep; empty for the first one."""

    @classmethod
    def of(cls, settings: StoreSettings) -> Sequence[Self]:
        """Return one configuration for each shard; none without a Redis."""
        urls = settings.url * settings.shards
        return [
            cls(
                url=url,
                prefix=settings.prefix,
                password_file=settings.password_file,
                durability=Durability(settings.redis_durability),
                replicas=settings.redis_replicas,
                shard=shard,
                shards=len(urls),
            )
            for shard, url in enumerate(urls)
        ]

    @property
    def root(self) -> str:
        """The start of every key, as a hash tag, so that a cluster of Redis keeps them in one place."""
        return f"{{{self.prefix}}}" if self.shards == 1 else f"{{{self.prefix}.{self.shard}}}"

    @property
    def address(self) -> str:
        """The URL without its password and options."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def password(self) -> str | None:
        """
        Raises:
            ConfigurationError: The file cannot be read, or others can read it.
        """
        if self.password_file is None:
            return None
        path = self.password_file.expanduser()
        try:
            password, mode = path.read_text().strip(), path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"the password of the Redis cannot be read: {error}",
                hint="Set [store] password_file to a file that the service's user can read.",
            ) from None
        if mode & OTHERS:
            raise ConfigurationError(
                f"others can read the password of the Redis in {path}", hint=f"Run chmod 600 {path}."
            )
        return password
