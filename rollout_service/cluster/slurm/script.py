"""Renders the batch script of a job.

Guarantees: the script holds no secret, and no value of a user in a place where the shell would interpret it. It is the
same for the same job, so it can be read before it is submitted.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from rollout_service.base.errors import ConfigurationError
from rollout_service.cluster.slurm.spec import JobSpec, Resources

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


def render(spec: JobSpec, folder: Path) -> str:
    """Return the script that runs a job from its folder.

    Raises:
        ConfigurationError: The folder has a name that a batch script cannot have.
    """
    lines = [
        f"--job-name={spec.name}",
        f"--output={_quoted(folder, '/logs/job-%j.log')}",
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
    return HEADER.format(name=spec.name, folder=folder, directives=directives, command=command)


def _quoted(folder: Path, file: str) -> str:
    """Return the name of a file in a folder as the value of a directive, in quotes if sbatch needs them.

    Raises:
        ConfigurationError: The folder has a line break, which ends a directive, or a backslash, after which sbatch puts
            no number of a job into a name.
    """
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
