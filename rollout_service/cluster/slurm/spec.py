"""The specification of a job, as its folder keeps it, and its batch script.

A specification that validates can be rendered; values that would become lines of the batch script hold no line break.
The script holds no secret, and no value of a user in a place where the shell would interpret it. It is the same for the
same job, so it can be read before it is submitted.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from rollout_service.base.errors import ConfigurationError

Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.,:=*/@%+-]{1,200}$")]
"""The value of one of Slurm's directives, such as a partition or a limit of time."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
END_SECONDS = 30.0
"""How much of `signal_seconds` is kept for the ends of engines and of Redis, after the services have drained."""
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


class Resources(BaseModel):
    """The resources that a component of a job requests from Slurm."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: int = Field(1, ge=1)
    """The number of nodes."""
    partition: Word | None = None
    """The partition; left out, the cluster's default."""
    cpus: int | None = Field(None, ge=1)
    """Processors of each node; left out, the node is not shared."""
    memory: Word | None = None
    """Memory of each node, as Slurm writes it: `64G`. Left out, the cluster's default."""
    gpus: int = Field(0, ge=0)
    """GPUs of each node."""
    directives: list[str] = []
    """More options of sbatch, such as `--constraint=a100`."""

    @field_validator("directives")
    @classmethod
    def _are_options(cls, directives: list[str]) -> list[str]:
        for directive in directives:
            if not re.fullmatch(r"--[a-z][a-z0-9-]*(=[^\r\n]*)?", directive):
                raise ValueError(f"{directive!r} is not an option of sbatch; write --name or --name=value")
        return directives


class Engines(BaseModel):
    """The inference engines that a job starts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str
    """The command that serves one engine in the foreground; `{host}` and `{port}` stand for where it listens."""
    per_node: int = Field(1, ge=1)
    """How many engines run on each node; they share its GPUs evenly."""
    resources: Resources | None = None
    """Nodes of their own, as a second component of the job; left out, they share the first node of the service."""
    start_seconds: float = Field(1_800.0, gt=0)
    """How long an engine may take to answer after its start."""

    @field_validator("command")
    @classmethod
    def _has_a_port(cls, command: str) -> str:
        shlex.split(command)  # a quotation without an end is refused here, and not on the nodes
        if "{port}" not in command:
            raise ValueError("the engine's command has no {port}, so two jobs on a node would collide; add it")
        return command


class JobSpec(BaseModel):
    """A job: a service on one node or more, with its engines, and perhaps a trainer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Name
    """The job's name, which its folder has too."""
    resources: Resources = Resources()
    time: Word = "24:00:00"
    """The limit of time, as Slurm writes it."""
    account: Word | None = None
    qos: Word | None = None
    signal_seconds: int = Field(120, ge=10)
    """How long before its end, by time or preemption, the job begins to drain."""
    engines: Engines | None = None
    backends: list[str] = []
    """Engines that run elsewhere, by URL."""
    trainer: list[str] = []
    """A program that trains against the service; the job ends with it."""
    flags: list[str] = []
    """More flags of `rollout-service serve`."""
    config: Path | None = None
    """A settings file for every node."""
    images: list[Name] = []
    """Images to build, once for all nodes, before the service starts."""
    images_dir: Path | None = None
    """The folder of images, which all nodes share."""
    scratch: Path | None = None
    """A folder on the nodes' local disks; left out, TMPDIR, or /tmp."""
    redis_server: str = "redis-server"
    """The program that a job of several nodes starts, unless `redis_url` names a Redis."""
    redis_url: str | None = None
    """A Redis that runs elsewhere."""
    redis_password_file: Path | None = None
    joinable: bool = False
    """Whether other jobs may join it: it then starts a Redis for one node too."""
    join: Path | None = None
    """The folder of another job, whose Redis, key and shared folder this job's nodes use: they do its work."""
    python: str = sys.executable
    """The Python of every node, in which this package is installed."""

    @field_validator("backends")
    @classmethod
    def _are_urls(cls, backends: list[str]) -> list[str]:
        for url in backends:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is not the URL of an engine; write http://HOST:PORT")
        return backends

    @field_validator("time")
    @classmethod
    def _is_a_time(cls, time: str) -> str:
        minutes_of(time)
        return time

    @model_validator(mode="after")
    def _ends_after_its_drain(self) -> JobSpec:
        minutes = minutes_of(self.time)
        if minutes is not None and minutes * 60 <= self.signal_seconds:
            raise ValueError(f"time {self.time} is over before the drain of {self.signal_seconds} s; ask for more")
        return self

    @model_validator(mode="after")
    def _has_one_redis(self) -> JobSpec:
        if self.join is not None and self.redis_url is not None:
            raise ValueError("a job that joins another uses that job's Redis; leave one of the two out")
        return self

    @property
    def shares_a_redis(self) -> bool:
        """A service of one node keeps its state in the job's folder."""
        is_alone = self.resources.nodes == 1 and not self.joinable
        return not is_alone or self.redis_url is not None or self.join is not None

    @property
    def most_drain_seconds(self) -> float:
        """The longest that its services can drain before Slurm ends them."""
        return self.signal_seconds - min(END_SECONDS, self.signal_seconds / 2)

    @property
    def starts_a_redis(self) -> bool:
        return self.shares_a_redis and self.redis_url is None and self.join is None


def minutes_of(time: str) -> float | None:
    """Return a limit of time in minutes; None if there is no limit.

    Raises:
        ValueError: It is not written as Slurm writes times.
    """
    if time.lower() in ("infinite", "unlimited"):
        return None
    found = _TIME.fullmatch(time)
    if found is None:
        raise ValueError(f"{time!r} is not a limit of time; write minutes, HH:MM:SS or D-HH:MM:SS")
    days, first, second, third = (int(part) if part else 0 for part in found.groups())
    if found[1] is not None:
        return days * 1_440 + first * 60 + second + third / 60
    if found[4] is not None:
        return first * 60 + second + third / 60
    return first + second / 60


HEADER = """\
#!/bin/bash
# {name}: rollout-service as a job of Slurm. Everything that it keeps is in
# {folder}
{directives}
umask 077
# The signals that ask the job to drain must not end it before it listens for them.
trap '' USR1 USR2
exec {command}
"""


def render(spec: JobSpec, folder: Path, *, slots: Sequence[int] = ()) -> str:
    """Return the script that runs a job from its folder.

    With `slots`, it is an array of jobs with these numbers. Their names and folders are those given here, followed by a
    dash and the number.

    Raises:
        ConfigurationError: The folder has a name that a batch script cannot have.
    """
    lines = [
        f"--job-name={spec.name}",
        *([f"--array={','.join(map(str, slots))}"] if slots else []),
        f"--output={_quoted(folder, '-%a/logs/job-%j.log' if slots else '/logs/job-%j.log')}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{spec.signal_seconds}",
        f"--time={spec.time}",
        *([f"--account={spec.account}"] if spec.account else []),
        *([f"--qos={spec.qos}"] if spec.qos else []),
        *_component(spec.resources),
    ]
    directives = "\n".join(f"#SBATCH {line}" for line in lines)
    if spec.engines is not None and spec.engines.resources is not None:
        own = [f"--time={spec.time}", *_component(spec.engines.resources)]
        directives += "\n#SBATCH hetjob\n" + "\n".join(f"#SBATCH {line}" for line in own)
    command = shlex.join([spec.python, "-m", "rollout_service.cli", "slurm", "run", str(folder)])
    command += '-"$SLURM_ARRAY_TASK_ID"' if slots else ""
    return HEADER.format(name=spec.name, folder=folder, directives=directives, command=command)


def _quoted(folder: Path, file: str) -> str:
    """Put the value of a directive in quotes if sbatch needs them."""
    if re.search(r"[\r\n\\]", str(folder)):
        raise ConfigurationError(
            f"the folder {str(folder)!r} has a line break or a backslash in its name, which a batch script cannot have",
            hint="Name another with --folder.",
        )
    name = str(folder).replace("%", "%%") + file
    if not re.search(r"[\s\"'#]", name):
        return name
    escaped = name.replace('"', r"\"")
    return f'"{escaped}"'


def _component(resources: Resources) -> list[str]:
    lines = [f"--nodes={resources.nodes}", "--ntasks-per-node=1", "--no-kill"]
    lines += [f"--partition={resources.partition}"] if resources.partition else []
    lines += [f"--cpus-per-task={resources.cpus}"] if resources.cpus else ["--exclusive"]
    lines += [f"--mem={resources.memory}"] if resources.memory else []
    lines += [f"--gres=gpu:{resources.gpus}"] if resources.gpus else []
    return [*lines, *resources.directives]
