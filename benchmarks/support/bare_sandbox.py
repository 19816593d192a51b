"""The costs of a sandbox's parts by themselves, which bound what this project's sandboxes can reach."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from common import START_SECONDS
from jupyter_client.blocking.client import BlockingKernelClient
from support.accounting import Account

from sandboxes.sessions.kernel import make_connection_info

QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def median_ms(call: Callable[[], object], count: int) -> float:
    """Return the median time of `count` calls, in milliseconds."""
    taken = []
    for _ in range(count):
        begun = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(taken)


def bare_bash(command: str, count: int) -> dict[str, float]:
    """Time a line to a bash on the host and its answer, over two pipes, in a loop that does nothing else."""
    argv = ["bash", "--norc", "--noprofile"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as bash:
        assert bash.stdin is not None
        assert bash.stdout is not None
        stdin, stdout = bash.stdin.fileno(), bash.stdout.fileno()
        line = f"{command}\n".encode()

        def call() -> None:
            os.write(stdin, line)
            os.read(stdout, 4096)

        taken = median_ms(call, count)
        bash.stdin.close()
    return {"limit_bash_p50_ms": taken}


def bare_apptainer(account: Account, apptainer: Path, image: Path, count: int) -> dict[str, float]:
    """Time `apptainer exec IMAGE true`, one after the other."""
    argv = [*exec_argv(apptainer, image), "true"]
    subprocess.run(argv, check=True, **QUIET)
    begun = account.cpu_seconds()
    taken = median_ms(lambda: subprocess.run(argv, check=True, **QUIET), count)
    cpu = (account.cpu_seconds() - begun) / count
    return {"bare_apptainer_exec_s": taken / 1e3, "bare_apptainer_exec_cpu_s": cpu}


def exec_argv(apptainer: Path, image: Path) -> list[str]:
    """Return the minimal `apptainer exec` command; as root, it may lack a capability that Apptainer wants to keep."""
    flags = ["--no-privs"] if os.geteuid() == 0 else []
    return [str(apptainer), "--silent", "exec", *flags, str(image)]


def bare_kernels(account: Account, apptainer: Path, image: Path, count: int) -> dict[str, float]:
    """Time IPython kernels from start to answer to end, on the host and under a bare `apptainer exec`."""
    host, ms = _kernels(account, [sys.executable], count)
    contained, _ = _kernels(account, [*exec_argv(apptainer, image), "python3"], count)
    return {
        "limit_python_p50_ms": ms,
        "bare_ipykernel_cpu_s": host,
        "bare_apptainer_ipykernel_cpu_s": contained,
    }


def _kernels(account: Account, python: Sequence[str], count: int) -> tuple[float, float]:
    """Return the CPU seconds per kernel, and the median round trip of a cell in milliseconds."""
    begun = account.cpu_seconds()
    for _ in range(count):
        with kernel(python):
            pass
    cpu = (account.cpu_seconds() - begun) / count
    with kernel(python) as client:
        ms = median_ms(lambda: client.execute_interactive("1 + 1", output_hook=_ignore), 100)
    return cpu, ms


def _ignore(message: object) -> None:
    del message


@contextmanager
def kernel(python: Sequence[str]) -> Iterator[BlockingKernelClient]:
    """Run a kernel until it answers; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="rollout-benchmark-") as folder:
        file = Path(folder) / "kernel.json"
        client = BlockingKernelClient()
        file.write_text(json.dumps(make_connection_info(f"{folder}/kernel")))
        client.load_connection_file(str(file))
        argv = [*python, "-m", "ipykernel_launcher", "-f", str(file)]
        with subprocess.Popen(argv, **QUIET) as process:
            try:
                client.start_channels(stdin=False, hb=False)  # a starting kernel has no heartbeat yet
                client.wait_for_ready(timeout=START_SECONDS)
                yield client
                client.shutdown()
                process.wait(timeout=START_SECONDS)
            finally:
                client.stop_channels()
                process.kill()
