"""Where the state of a job is, for backups of it.

While the job runs, its own Redis is used; otherwise its Redis is started from its files for as long as it is needed, so
that two never write the same files.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rollout_service.backup.manifest import ONLY, Places, SharedStore
from rollout_service.base.errors import ConfigurationError, StoreError
from rollout_service.cluster.slurm.folder import JobFolder
from rollout_service.cluster.slurm.redis_server import (
    GRACE_SECONDS,
    START_SECONDS,
    claim_files,
    redis_address,
    redis_program,
)
from rollout_service.cluster.slurm.spec import JobSpec
from rollout_service.store.segments.files import SharedFiles
from sandboxes.host.kernel_calls import end_with_parent

if TYPE_CHECKING:  # the package of Redis may be missing
    from rollout_service.store.redis import RedisConfig

_LOOK_SECONDS = 0.1


@contextmanager
def job_places(folder: JobFolder, *, is_running: bool) -> Iterator[Places]:
    """Yield the places of a job, without those of the job that it joined.

    Raises:
        ConfigurationError: The folder is not a job's, or its Redis cannot be started here.
        StoreError: Its Redis does not answer, or has been started meanwhile.
    """
    spec = folder.load().spec
    keys = {"job/key": folder.key_file, "job/keys.toml": folder.keys_file}
    if not spec.shares_a_redis:
        yield Places({ONLY: folder.state(None)}, documents=keys)
        return
    states = {f"node-{slot}": folder.state(slot) for slot in range(spec.resources.nodes)}
    if spec.join is not None:
        yield Places(states, owns_store=False, documents=keys)
        return
    with _redis(folder, spec, is_running=is_running) as config:
        shared = [SharedStore(config, SharedFiles(folder.path / "shared"))]
        yield Places(states, owns_store=False, shared=shared, documents=keys)


@contextmanager
def _redis(folder: JobFolder, spec: JobSpec, *, is_running: bool) -> Iterator[RedisConfig]:
    from rollout_service.store.redis import RedisConfig

    if spec.starts_a_redis and not is_running:
        with _claimed(folder), _started(folder, spec) as config:
            yield config
        return
    url = redis_address(folder, spec)
    if url is None:
        raise ConfigurationError(
            f"the Redis of job {spec.name} has not started", hint=f"Its log is {folder.log('redis')}."
        )
    password = spec.redis_password_file if spec.redis_url is not None else folder.path / "redis" / "password"
    yield RedisConfig(url, prefix=spec.name, password_file=password)


@contextmanager
def _claimed(folder: JobFolder) -> Iterator[None]:
    """Let a job that begins meanwhile wait with its own Redis."""
    try:
        claim = claim_files(folder)
    except StoreError as error:
        raise StoreError(
            f"another Redis has the files of the job: {error}",
            hint="If the job has started meanwhile, run the command again. Otherwise wait for the other backup.",
        ) from error
    try:
        yield
    finally:
        claim.release()


@contextmanager
def _started(folder: JobFolder, spec: JobSpec) -> Iterator[RedisConfig]:
    """Run a Redis on the files of a job that does not run, reachable for this user alone."""
    from rollout_service.store.redis import RedisConfig

    with tempfile.TemporaryDirectory(prefix="rollout-redis-") as private:
        socket = Path(private) / "redis.sock"
        options = {"port": "0", "unixsocket": str(socket), "dir": str(folder.path / "redis"), "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        config = RedisConfig(f"unix://{socket}", prefix=spec.name)
        with folder.log("redis").open("ab") as log:
            # However this process ends, Redis does too: the job starts its own on these files.
            process = subprocess.Popen(
                [redis_program(spec), *words], stdout=log, stderr=log, preexec_fn=end_with_parent
            )
        try:
            _wait_until_ready(config, process, folder)
            yield config
        finally:
            process.terminate()
            process.wait(GRACE_SECONDS)


def _wait_until_ready(config: RedisConfig, process: subprocess.Popen[bytes], folder: JobFolder) -> None:
    import redis

    from rollout_service.store.redis.checks import execute, open_client

    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with closing(open_client(config)) as client:
                execute(client, "PING")
        except redis.RedisError:  # it reads its files
            time.sleep(_LOOK_SECONDS)
        else:
            return
    raise StoreError("the Redis of the job cannot be started", hint=f"Its log is {folder.log('redis')}.")
