"""Slurm's commands, as this package uses them: none needs accounting, and all exist since Slurm 22.05.

Every failure is a `ConfigurationError` with Slurm's answer and a hint.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from rollout_service.base.errors import ConfigurationError
from rollout_service.cluster.slurm.spec import minutes_of

ANSWER_SECONDS = 60.0
"""A busy controller takes many seconds."""
OVER = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)


@dataclass(frozen=True, slots=True)
class JobState:
    job: str
    state: str
    """As Slurm names it; `NOT_SUBMITTED` before, and `UNKNOWN` once Slurm has forgotten the job."""
    reason: str = ""
    nodes: str = ""
    restarts: int = 0

    @property
    def is_over(self) -> bool:
        return self.state in OVER or self.state == "UNKNOWN"


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A task of an array that has not ended."""

    job: str
    """Like `17_2`."""
    index: int
    state: str
    seconds_left: float | None = None
    """None without a limit, and for a job that does not run."""

    @property
    def is_running(self) -> bool:
        return self.state == "RUNNING"

    @property
    def is_ending(self) -> bool:
        return self.state in OVER or self.state == "COMPLETING"


@dataclass(frozen=True, slots=True)
class PartitionNode:
    node: str
    partition: str
    is_default: bool
    is_up: bool
    cpus: int
    memory_mebibytes: int
    gpus: int
    time_limit: str


async def submit(script: Path) -> str:
    """Return the job's id."""
    said = await run(["sbatch", "--parsable", str(script)])
    return said.strip().splitlines()[-1].partition(";")[0]


async def job_state(job: str) -> JobState:
    try:
        said = await run(["scontrol", "--oneliner", "show", "job", job])
    except ConfigurationError as error:
        if "Invalid job id" in str(error):
            return JobState(job, "UNKNOWN")
        raise
    fields = dict(part.partition("=")[::2] for part in said.splitlines()[0].split())
    return JobState(
        job,
        fields.get("JobState", "UNKNOWN"),
        "" if fields.get("Reason") == "None" else fields.get("Reason", ""),
        fields.get("NodeList", "").replace("(null)", ""),
        int(fields.get("Restarts", 0)),
    )


async def queued_jobs(script: Path) -> list[QueuedJob]:
    """Return the tasks that have not ended of the arrays that were submitted with a script."""
    said = await run(["squeue", "--me", "--noheader", "--array", "--format=%i|%K|%T|%L|%o"])
    lines = [line.split("|", 4) for line in said.splitlines() if line.count("|") >= 4]
    return [
        QueuedJob(job, int(index), state, _seconds(left) if state == "RUNNING" else None)
        for job, index, state, left, command in lines
        if index.isdigit() and command.strip() == str(script)
    ]


def _seconds(time: str) -> float | None:
    try:
        minutes = minutes_of(time)
    except ValueError:  # such as INVALID, once the limit is over
        return 0.0
    return None if minutes is None else minutes * 60


async def partition_nodes() -> list[PartitionNode]:
    said = await run(["sinfo", "-h", "-N", "-o", "%N|%P|%a|%c|%m|%G|%l"])
    return [_partition_node(line) for line in said.splitlines() if line.strip()]


def _partition_node(line: str) -> PartitionNode:
    node, partition, available, cpus, memory, gres, limit = (part.strip() for part in line.split("|"))
    return PartitionNode(
        node,
        partition.rstrip("*"),
        partition.endswith("*"),
        available == "up",
        int(cpus.rstrip("+")),
        int(memory.rstrip("+")),
        sum(_gpus(part) for part in gres.split(",")),
        limit,
    )


def _gpus(gres: str) -> int:
    """Return the GPUs of one entry, such as `gpu:a100:4(S:0-1)`."""
    fields = gres.partition("(")[0].split(":")
    return int(fields[-1]) if fields[0] == "gpu" and fields[-1].isdigit() else 0


async def host_names(nodes: str) -> list[str]:
    """Expand a list such as `n[1-3]`."""
    return (await run(["scontrol", "show", "hostnames", nodes])).split()


async def cancel(job: str, *flags: str) -> None:
    await run(["scancel", *flags, job])


async def end(job: str) -> None:
    """Let a running job drain and end in order."""
    await cancel(job, "--batch", "--signal=USR2")


async def end_array(script: Path, tell: Callable[[QueuedJob], None] = lambda _: None) -> None:
    """End the tasks of arrays that were submitted with a script: those that run in order, and the others at once."""
    for job in await queued_jobs(script):
        if not job.is_ending:
            tell(job)
            await (end if job.is_running else cancel)(job.job)


async def requeue(job: str) -> None:
    await run(["scontrol", "requeue", job])


async def run(command: Sequence[str]) -> str:
    """
    Raises:
        ConfigurationError: The command is not installed, fails, or does not answer.
    """
    if shutil.which(command[0]) is None:
        raise ConfigurationError(
            f"{command[0]} is not in PATH",
            hint="Run this on a machine of the cluster, such as a login node, perhaps after `module load slurm`.",
        )
    with anyio.move_on_after(ANSWER_SECONDS) as scope:
        done = await anyio.run_process(command, check=False, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    if scope.cancelled_caught:
        raise ConfigurationError(
            f"{command[0]} did not answer for {ANSWER_SECONDS:g} s",
            hint="Ask for the controller: scontrol ping.",
        )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise ConfigurationError(f"{' '.join(command[:2])}: {said}", hint=_hint(said))
    return done.stdout.decode(errors="replace")


def _hint(said: str) -> str:
    if "account" in said.lower():
        return "Name an account that you may use with --account, and see `sacctmgr show associations user=$USER`."
    if "Unable to contact" in said:
        return "The controller does not answer; see `scontrol ping`."
    return "`sinfo` shows the partitions with their limits, `squeue --me` your jobs."
