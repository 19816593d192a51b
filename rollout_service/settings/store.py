"""The settings of the store, of the nodes that share it, and of how long it keeps ended rollouts and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from api_schemas.base import Name
from rollout_service.settings.values import Labels, Names, Section

MAX_SHARDS = 16


class StoreSettings(Section):
    """Where rollouts and results are kept. Left out, in a SQLite file in the state folder, for one node."""

    url: Names = Field([], max_length=MAX_SHARDS)
    """The Redis that the services of many nodes share: `redis://HOST:PORT/0`, `rediss://HOST:PORT/0` (TLS), or
    `unix:///PATH/redis.sock`. A password belongs in `password_file`. Several, each a Redis of its own, are the shards
    of one store, over which runs are spread. Their number and order are fixed once the store exists."""
    shards: int = Field(1, ge=1, le=MAX_SHARDS)
    """How many shards a store at a single `url`, that of a cluster of Redis, has: each has a slot of its own, and so,
    mostly, another server. Fixed once the store exists."""
    prefix: str = Field("rollouts", pattern="^[A-Za-z0-9_.-]{1,64}$")
    """The name that the keys in Redis begin with: services with the same prefix do the same work."""
    password_file: Path | None = None
    """A file with the password of the Redis, which only its owner may read (mode 0600)."""
    folder: Path | None = None
    """The folder for trajectories, which are too large for the Redis; all nodes share it, under any path. Left out,
    they are in the Redis."""
    objects: str | None = Field(None, pattern=r"^s3://[A-Za-z0-9][A-Za-z0-9_.-]{1,254}(/[^?#]*)?$")
    """In place of `folder`, the part of a bucket for trajectories: `s3://BUCKET/PREFIX`. Credentials are never here:
    they are found as the AWS tools find them, in variables, in `~/.aws`, or from the role of the machine."""
    objects_endpoint: str | None = Field(None, pattern="^https?://[^/@?#]+/?$")
    """The address of the server that has the bucket: `https://HOST:PORT`. Left out, AWS, or `AWS_ENDPOINT_URL_S3`."""
    objects_region: Name | None = None
    """The region of the bucket. Left out, as the AWS tools find it, or `us-east-1`."""
    redis_durability: Literal["strict", "relaxed"] = "strict"
    """`strict` refuses a Redis that could lose acknowledged writes: it needs `appendonly yes` and `appendfsync
    always`. `relaxed` accepts that a crash of Redis loses work."""
    disk: Literal["local", "network"] = "local"
    """Where the state folder is: on a disk of this host, or on a file system that other hosts see too, such as NFS or
    Lustre. On such a one, SQLite keeps a rollback journal, since its write-ahead log needs memory that only the
    processes of one host share, and writes take longer. One service at a time may use the folder."""
    redis_replicas: int = Field(0, ge=0, le=16)
    """How many replicas of the Redis must have a write before it is acknowledged, so that a failover to them loses
    nothing. While there are fewer, work is refused."""

    @field_validator("url")
    @classmethod
    def _urls_have_no_password(cls, urls: list[str]) -> list[str]:
        for parts in map(urlsplit, urls):
            if parts.scheme not in ("redis", "rediss", "unix"):
                raise ValueError("not the address of a Redis; use redis://, rediss:// or unix://")
            if parts.password is not None or "password=" in parts.query:
                raise ValueError("the URL contains a password; put it in a file, and set password_file")
        if len(set(urls)) < len(urls):
            raise ValueError("a URL is given twice; each shard needs a Redis of its own")
        return urls

    @model_validator(mode="after")
    def _one_way_to_shard(self) -> Self:
        if self.shards > 1 and len(self.url) != 1:
            raise ValueError("`shards` divides the store at one `url`; with several, each of them is a shard")
        return self

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.folder is not None and self.objects is not None:
            raise ValueError("`folder` and `objects` are both set; keep one")
        return self


class ClusterSettings(Section):
    """This node among those that share the store."""

    name: Name | None = None
    """The name of this node; every node that shares the store needs its own. Left out, the host name."""
    labels: Labels = []
    """Labels of this node that environments may require, such as `large-disk`. It runs only environments whose
    `[sandbox] requires` it has."""
    address: str | None = Field(None, pattern="^https?://[^/]+$")
    """The URL at which others reach this node's API, as `GET /v1/nodes` shows it. Left out, made of `host` and
    `port`."""


class RetentionSettings(Section):
    """How long ended work is kept, in seconds. Left out, it is kept forever.

    Nothing is deleted before its trainer has acknowledged it. See docs/reference/runs.md, Retention.
    """

    ended_run_seconds: float | None = Field(None, ge=0)
    """Runs that are over, with everything that they produced."""
    settled_group_seconds: float | None = Field(None, ge=0)
    """Rollouts of groups that were acknowledged or dropped; the run's `retention` says when their tokens go."""
    rollout_seconds: float | None = Field(None, ge=0)
    """Rollouts that belong to no run, whether or not anyone has read them."""
