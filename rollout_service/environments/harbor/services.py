"""Starts the services of a task's Compose file as processes of its sandbox.

Guarantee: when `start_services` returns, each service has started in its order, is healthy if it has a check, and has
not failed; each is reached by its name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rollout_service.environments.harbor.compose import MAIN, Compose, ComposeService
from rollout_service.environments.harbor.errors import HealthcheckFailedError
from rollout_service.environments.harbor.task_toml import HealthcheckTable
from sandboxes import Sandbox

LOGS = "/logs/services"
PRINTED_CHARS = 2_000
COMPLETE_SECONDS = 600.0
"""The limit for a service that others wait for until it has completed; the deadline of `init` is usually nearer."""
_RUN = f"""
log={LOGS}/$1; shift
"$@" >"$log" 2>&1 </dev/null
code=$?
echo $code >"$log.exit"
exit $code
"""
_FAILED = f"""
shopt -s nullglob
for file in {LOGS}/*.exit; do
    read -r code <"$file"
    if [ "$code" != 0 ]; then echo "${{file%.exit}}"; exit 1; fi
done
"""

Check = Callable[[Sandbox, HealthcheckTable], Awaitable[None]]


async def start_services(sandbox: Sandbox, compose: Compose, require_healthy: Check) -> None:
    """Start all services but the agent's own, which is the sandbox, in the order of what they depend on.

    Raises:
        HealthcheckFailedError: One did not become healthy, or failed.
    """
    hosts = "".join(f"127.0.0.1 {name}\n" for name in {MAIN: None, **compose.services})
    prepare = f"mkdir -p {LOGS} && cat >>/etc/hosts"
    prepared = await sandbox.exec(["bash", "-c", prepare], cwd="/", stdin=hosts.encode())
    if prepared.exit_code != 0:
        raise HealthcheckFailedError(
            f"services cannot get names: {prepared.stderr.decode(errors='replace')}",
            hint='Use provider = "apptainer", which makes /etc/hosts writable.',
        )
    for name in compose.order():
        service = compose.services[name]
        if service.argv:
            await _start(sandbox, name, service, completes=compose.is_awaited(name))
        if check := service.health:
            try:
                await require_healthy(sandbox, check)
            except HealthcheckFailedError as error:
                said = await _printed(sandbox, f"{LOGS}/{name}")
                raise HealthcheckFailedError(
                    f"the service {name!r}: {error}{said}", hint=error.hint
                ) from error
    await _require_none_failed(sandbox)


async def _start(sandbox: Sandbox, name: str, service: ComposeService, *, completes: bool) -> None:
    folder = service.working_dir or sandbox.workdir
    await sandbox.exec(
        ["mkdir", "-p", "--", folder, *(one.split(":")[1] for one in service.volumes)], cwd="/"
    )
    run = ["bash", "-c", _RUN, "service", name, *service.argv]
    if not completes:
        run = ["bash", "-c", '"$@" >/dev/null 2>&1 </dev/null &', "start", *run]
    done = await sandbox.exec(run, cwd=folder, env=service.environment, timeout=COMPLETE_SECONDS)
    if done.timed_out:
        raise HealthcheckFailedError(f"the service {name!r} did not complete within {COMPLETE_SECONDS:g} s")
    if completes:
        await _require_none_failed(sandbox)


async def _require_none_failed(sandbox: Sandbox) -> None:
    done = await sandbox.exec(["bash", "-c", _FAILED], cwd="/")
    if done.exit_code != 0:
        log = done.stdout.decode(errors="replace").strip()
        raise HealthcheckFailedError(
            f"the service {log.rpartition('/')[2]!r} failed{await _printed(sandbox, log)}",
            hint="Run its command in a sandbox of the task's image: `rollout-service env shell`.",
        )


async def _printed(sandbox: Sandbox, log: str) -> str:
    done = await sandbox.exec(["tail", "-c", str(PRINTED_CHARS), log], cwd="/")
    said = done.stdout.decode(errors="replace").strip()
    return f"; it printed: {said}" if said else "; it printed nothing"
