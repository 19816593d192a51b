"""The Redis of a job that was given none.

Every write is on disk before it is acknowledged; its append-only file is in the job's folder, so it survives the job's
end and is read again when the job is requeued; no backup's Redis has these files at the same time; only holders of the
password, a file of mode 0600, reach it.
"""

from __future__ import annotations

import secrets
import shutil
import socket
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import structlog

from rollout_service.base.errors import ConfigurationError, StoreError
from rollout_service.base.private_files import write_private
from rollout_service.cluster.slurm.children import KeptProcess
from rollout_service.cluster.slurm.folder import JobFolder, own_address
from rollout_service.cluster.slurm.spec import JobSpec
from rollout_service.store.sqlite.connection import FileClaim
from sandboxes.host.ports import free_port

log = structlog.get_logger(__name__)

GRACE_SECONDS = 30.0
LOOK_SECONDS = 0.5
START_SECONDS = 120.0
CONFIGURATION = """\
bind {address}
port {port}
requirepass {password}
dir "{folder}"
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
daemonize no
"""


def claim_files(folder: JobFolder) -> FileClaim:
    """Keep others from running a Redis on the job's files, on whatever host.

    Raises:
        StoreError: Another process has claimed them.
    """
    return FileClaim(folder.path / "redis" / "files")


async def wait_for_files(folder: JobFolder, stopping: anyio.Event) -> FileClaim | None:
    """Claim the files as soon as nobody else does; return None if `stopping` is set before."""
    is_logged = False
    while not stopping.is_set():
        try:
            return claim_files(folder)
        except StoreError as error:
            if not is_logged:
                log.warning("another Redis has the job's files: waiting for the end of a backup", why=str(error))
                is_logged = True
        with anyio.move_on_after(LOOK_SECONDS):
            await stopping.wait()
    return None


def redis_child(folder: JobFolder, spec: JobSpec) -> KeptProcess:
    """Return the Redis to run on this node, after its address is in the job's folder.

    Raises:
        ConfigurationError: There is no such program.
    """
    program = redis_program(spec)
    path, address = folder.path / "redis", own_address()
    password_file = path / "password"
    if not password_file.exists():
        write_private(password_file, secrets.token_urlsafe(32).encode())
    _listen_at(path, address, free_port(address))
    return KeptProcess(
        "redis",
        [program, str(path / "redis.conf")],
        folder.log("redis"),
        GRACE_SECONDS,
        # It also exits with 0 when somebody else ends it, such as a daemon that frees memory.
        final_codes=frozenset(),
        before_restart=partial(_move_if_taken, path, address),
    )


def _listen_at(path: Path, address: str, port: int) -> None:
    text = CONFIGURATION.format(
        address=address,
        port=port,
        password=(path / "password").read_text(),
        folder=str(path).replace('"', r"\""),  # the script of the job refuses folders with a backslash
    )
    write_private(path / "redis.conf", text.encode())
    write_private(path / "address", f"redis://{address}:{port}/0".encode())


def _move_if_taken(path: Path, address: str) -> None:
    """Choose another port if another program has taken the one of before; the nodes follow the address."""
    try:
        port = urlsplit((path / "address").read_text()).port
        try:
            socket.create_server((address, port or 0)).close()
        except OSError:
            other = free_port(address)
            _listen_at(path, address, other)
            log.warning("the port of the job's Redis is taken: it moves to another", port=port, moved_to=other)
    except OSError as error:  # a shared file system fails for a moment
        log.warning("the job's Redis may find its port taken", error=str(error))


def redis_program(spec: JobSpec) -> str:
    """
    Raises:
        ConfigurationError: There is no such program.
    """
    program = shutil.which(spec.redis_server)
    if program is None:
        raise ConfigurationError(
            f"there is no program {spec.redis_server!r}, which nodes share their work through",
            hint="Name one with --redis-server (`scripts/install-redis` unpacks it), or a running Redis with --redis.",
        )
    return program


def redis_address(folder: JobFolder, spec: JobSpec) -> str | None:
    """Return the URL of the Redis that a job's nodes share; None while it is not known."""
    if spec.redis_url is not None:
        return spec.redis_url
    try:
        return (folder.path / "redis" / "address").read_text()
    except OSError:  # there is none, or a shared file system fails for a moment
        return None


async def wait_for_redis(folder: JobFolder, spec: JobSpec, stopping: anyio.Event) -> str | None:
    """Return the URL once it is known; None if `stopping` is set before.

    Raises:
        ConfigurationError: The job does not start one in time.
    """
    deadline = anyio.current_time() + START_SECONDS
    while anyio.current_time() < deadline and not stopping.is_set():
        if (url := redis_address(folder, spec)) is not None:
            return url
        with anyio.move_on_after(LOOK_SECONDS):
            await stopping.wait()
    if stopping.is_set():
        return None
    raise ConfigurationError(f"the Redis of job {spec.name} has not started", hint=f"Its log is {folder.log('redis')}.")
