"""Refuses a job that its partition can never run, with the partition's limits; Slurm would leave some in the queue
forever.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollout_service.base.errors import ConfigurationError, did_you_mean
from rollout_service.cluster.slurm.commands import PartitionNode
from rollout_service.cluster.slurm.spec import JobSpec, Resources, minutes_of

_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


def check_fits(spec: JobSpec, nodes: Sequence[PartitionNode]) -> None:
    """
    Raises:
        ConfigurationError: The partition does not exist, or has less than the job asks for.
    """
    _check(spec.resources, spec.time, nodes)
    if spec.engines is not None and spec.engines.resources is not None:
        _check(spec.engines.resources, spec.time, nodes)


def _check(resources: Resources, time: str, nodes: Sequence[PartitionNode]) -> None:
    name = resources.partition or next((node.partition for node in nodes if node.is_default), None)
    names = sorted({node.partition for node in nodes})
    if name is None:
        raise ConfigurationError("the cluster has no default partition", hint=f"Name one: {', '.join(names)}.")
    there = [node for node in nodes if node.partition in name.split(",")]
    if not there:
        raise ConfigurationError(
            f"there is no partition {name!r}",
            hint=did_you_mean(name, names) or f"There are {', '.join(names)}.",
        )
    if not any(node.is_up for node in there):
        raise ConfigurationError(f"partition {name} is down", hint="Choose another; `sinfo` lists them.")
    fitting = [node for node in there if _fits(resources, node)]
    if len(fitting) < resources.nodes:
        largest = max(there, key=lambda node: (node.gpus, node.cpus, node.memory_mebibytes))
        raise ConfigurationError(
            f"the job asks for {_asked(resources)}, and partition {name} has {len(fitting)} such nodes of "
            f"{len(there)}; its largest has {largest.cpus} processors, {largest.memory_mebibytes} MiB and "
            f"{largest.gpus} GPUs",
            hint="Ask for less with --nodes, --cpus, --memory or --gpus, or choose another --partition.",
        )
    _check_time(name, time, there)


def _check_time(name: str, time: str, there: Sequence[PartitionNode]) -> None:
    limits = [minutes_of(node.time_limit) for node in there]
    asked = minutes_of(time)
    known = [limit for limit in limits if limit is not None]
    if len(known) == len(limits) and (asked is None or asked > max(known)):
        raise ConfigurationError(
            f"the job asks for {time}, and partition {name} ends jobs after {there[0].time_limit}",
            hint=f"Pass --time {there[0].time_limit}: the job is requeued at its end, and resumes.",
        )


def _fits(resources: Resources, node: PartitionNode) -> bool:
    memory = _mebibytes(resources.memory)
    return (
        (resources.cpus or 1) <= node.cpus
        and resources.gpus <= node.gpus
        and (memory is None or memory <= node.memory_mebibytes)
    )


def _asked(resources: Resources) -> str:
    parts = [f"{resources.cpus or 'all'} processors"]
    parts += [f"{resources.memory} of memory"] if resources.memory else []
    parts += [f"{resources.gpus} GPUs"] if resources.gpus else []
    return f"{resources.nodes} nodes with {', '.join(parts)}"


def _mebibytes(memory: str | None) -> float | None:
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", memory or "", re.IGNORECASE)
    return None if found is None else int(found[1]) * _UNITS[found[2].upper() or "M"]
