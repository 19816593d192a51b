"""The meaning of Redis's errors: a StoreError with a hint, or a DefectError if this program is at fault."""

from __future__ import annotations

from typing import Any

import redis

from rollout_service.base.errors import DefectError, ServiceError, StoreError
from rollout_service.store.redis.config import RedisConfig

_REPORT = "Report it with the log's traceback; the store was not changed."
_BY_PREFIX = {
    "MISCONF": "Redis cannot write to its disk: free space there, and see its log. No restart is needed.",
    "OOM": "Redis is full: raise its maxmemory, or let old work be deleted with [retention]. No restart is needed.",
    "READONLY": "Redis is a replica, or became one: point [store] url to the primary.",
    "NOREPLICAS": "Redis has too few replicas to accept writes: bring them back.",
    "MASTERDOWN": "The Redis is a replica that has lost its primary: point [store] url to the primary.",
    "LOADING": "Redis is reading its files after a start: wait.",
    "BUSY": "A script blocks Redis: end it with SCRIPT KILL or FUNCTION KILL.",
    "NOPERM": "Give the Redis user all commands on the keys and channels of the prefix (ACL SETUSER).",
    "WRONGPASS": "Set [store] password_file to a file with the right password, and the user in the url.",
    "NOAUTH": "Set [store] password_file to a file with the password.",
    "CLUSTERDOWN": "The cluster of Redis is down: see CLUSTER INFO.",
    "UNKILLABLE": "A script blocks Redis: restart it.",
    "TRYAGAIN": "The cluster of Redis moves the store's slot: wait.",
}
"""Keyed by the first word of an answer. All these errors pass once their hint is followed."""
_BY_TYPE = (
    (redis.AuthenticationError, _BY_PREFIX["WRONGPASS"]),
    (redis.ReadOnlyError, _BY_PREFIX["READONLY"]),
    (redis.OutOfMemoryError, _BY_PREFIX["OOM"]),
    (redis.BusyLoadingError, _BY_PREFIX["LOADING"]),
    (redis.exceptions.NoPermissionError, _BY_PREFIX["NOPERM"]),
    (redis.exceptions.ClusterDownError, _BY_PREFIX["CLUSTERDOWN"]),
    (redis.exceptions.MasterDownError, _BY_PREFIX["MASTERDOWN"]),
    # Redis says where to ask instead, but that node has only some of the keys until all are moved.
    (redis.exceptions.AskError | redis.exceptions.TryAgainError, _BY_PREFIX["TRYAGAIN"]),
    (
        redis.InvalidResponse,
        "Another program answers at this address: correct [store] url (TLS needs rediss://).",
    ),
    (
        redis.TimeoutError,
        "Redis is too slow or was stopped: look at its host's load and its disk. No restart is needed.",
    ),
    (
        redis.ConnectionError,
        "Start Redis, or correct [store] url; check the network, and the certificate if it is rediss://.",
    ),
)


def is_away(error: redis.RedisError | OSError) -> bool:
    """Tell a Redis that does not answer, or not yet, from one that refuses."""
    if isinstance(error, redis.AuthenticationError):  # a ConnectionError too
        return False
    not_yet = (redis.BusyLoadingError, redis.exceptions.ClusterDownError, redis.exceptions.MasterDownError)
    return isinstance(error, (redis.ConnectionError, redis.TimeoutError, OSError, *not_yet))


def explain(error: redis.RedisError | OSError, address: str) -> ServiceError:
    """Return the service's error for an error of Redis, which becomes its cause."""
    text = str(error) or type(error).__name__
    hint = _hint(error, text)
    failure: ServiceError
    if hint is None:
        failure = DefectError(f"a function of the store is wrong: {text}", hint=_REPORT)
    else:
        failure = StoreError(f"the Redis at {address} fails: {text}", hint=hint)
    failure.__cause__ = error
    return failure


def too_few_replicas(reached: Any, config: RedisConfig) -> StoreError | None:
    """Return an error if a write is not in enough replicas; `reached` is the answer to WAIT."""
    if isinstance(reached, int) and reached >= config.replicas:
        return None
    return StoreError(
        f"the Redis at {config.address} has the write, but its replicas do not: {reached} of {config.replicas}",
        hint="Start or repair its replicas (INFO replication), or lower [store] redis_replicas.",
    )


def was_not_run(error: BaseException) -> bool:
    """Return whether to repeat a call at once: Redis has lost the library, or another node has the store."""
    is_lost = isinstance(error, redis.ResponseError) and "unction not found" in str(error)
    return is_lost or isinstance(error, redis.exceptions.MovedError)


def breaks_connection(error: BaseException) -> bool:
    """Return whether to connect anew: the connection is gone, or leads to the wrong server."""
    return isinstance(
        error,
        redis.ConnectionError
        | redis.TimeoutError
        | redis.ReadOnlyError
        | redis.InvalidResponse
        | redis.exceptions.ClusterDownError
        | redis.exceptions.MovedError
        | OSError,
    )


def _hint(error: BaseException, text: str) -> str | None:
    for kind, hint in _BY_TYPE:
        if isinstance(error, kind):
            return hint
    word = text.removeprefix("-").split(" ", 1)[0].rstrip(":")
    if word in _BY_PREFIX:
        return _BY_PREFIX[word]
    return None if isinstance(error, redis.ResponseError) else _BY_TYPE[-1][1]
