"""A service for `reclaim.py` to kill, which starts, uses and closes sandboxes without pause.

Run: python benchmarks/programs/churn.py RUN_DIR STATE_DIR WORKERS [PROVIDER]

With no workers, it keeps one sandbox instead, and answers each line of its input with the output of a command there.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import anyio
import anyio.to_thread

from sandboxes import ApptainerConfig, LocalConfig, SandboxError, SandboxProvider, SandboxSpec, make_provider

MESS = (
    "setsid sleep 1000 & disown; nohup sleep 1000 >/dev/null 2>&1 & mkdir -p a/b/c; mkfifo a/pipe;"
    " head -c 1000000 /dev/zero >a/b/zero; ln -s / a/b/root; chmod 0 a/b; sleep 0.$RANDOM"
)


async def work(provider: SandboxProvider) -> None:
    """Start, use and close one sandbox after the other, leaving a mess in each."""
    draw = random.Random()
    while True:
        try:
            sandbox = await provider.start(SandboxSpec())
            await (await sandbox.bash()).run(MESS)
            if draw.random() < 0.2:
                await (await sandbox.python()).execute("open('/tmp/from_python', 'w').write('x' * 100_000)")
            await sandbox.close()
        except SandboxError as error:
            sys.stderr.write(f"{error}\n")


async def stay(provider: SandboxProvider) -> None:
    """Keep one sandbox that can be asked whether it is well."""
    sandbox = await provider.start(SandboxSpec())
    bash = await sandbox.bash()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while await anyio.to_thread.run_sync(sys.stdin.readline):
        sys.stdout.write((await bash.run("echo well")).output)
        sys.stdout.flush()


async def main() -> None:
    run_dir, state_dir, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    config = (
        LocalConfig(provider="local", run_dir=run_dir)
        if sys.argv[4:] == ["local"]
        else ApptainerConfig(run_dir=run_dir)
    )
    provider = make_provider(config, state_dir)
    await provider.sweep()
    if not workers:
        await stay(provider)
        await provider.close()
        return
    async with anyio.create_task_group() as tasks:
        for _ in range(workers):
            tasks.start_soon(work, provider)


if __name__ == "__main__":
    anyio.run(main, backend_options={"use_uvloop": True})
