"""Runs, groups and batches as stored records."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime

from pydantic import TypeAdapter

from api_schemas.errors import ErrorInfo
from api_schemas.exports import ExportedSample
from api_schemas.rollouts import Rollout, RolloutRequest
from api_schemas.runs import Group, GroupSample, InlineTasks, RunRequest, RunState
from api_schemas.runs.auxiliary import RewardWeights
from api_schemas.tasks import Task
from rollout_service.base.errors import RecordLostError
from rollout_service.base.ids import BatchId, GroupId
from rollout_service.groups.shares import Owner
from rollout_service.store.codec import rollouts as codec
from rollout_service.store.codec.record import Row
from rollout_service.store.runs_contract import BatchLease, ClosedSample, GroupClosure, RunRecord

_SAMPLES = TypeAdapter(list[ClosedSample])
_OWNERS = {"__all__": {"owner"}}


def without_tasks(request: RunRequest) -> RunRequest:
    """Return the request without its inline tasks, which may be many and are stored one by one."""
    if not isinstance(request.source, InlineTasks):
        return request
    return request.model_copy(update={"source": request.source.model_copy(update={"tasks": []})})


def encode_request(request: RunRequest) -> str:
    """Return a request as JSON, without its inline tasks."""
    return without_tasks(request).model_dump_json()


def decode_tasks(texts: Iterable[str | bytes]) -> list[Task]:
    """Return inline tasks, which are stored one by one as JSON."""
    return [Task.model_validate_json(text) for text in texts]


def decode_run(row: Row, counters: Mapping[str, int], *, request: RunRequest | None = None) -> RunRecord:
    """Return a run from its row and its counters; `request` is the row's, if it is parsed already."""
    return RunRecord(
        run_id=row["run_id"],
        request=request or RunRequest.model_validate_json(row["request"]),
        state=RunState(row["state"]),
        version=row["version"],
        first_version=row["first_version"],
        tasks=row["tasks"],
        total=row["total"],
        digest=row["digest"],
        cursor=row["cursor"],
        counters=dict(counters),
        problem=ErrorInfo.model_validate_json(row["problem"]) if row["problem"] else None,
        created_at=codec.when(row["created_at"]),
        changed_at=codec.when(row["changed_at"]),
    )


def encode_samples(samples: Sequence[ClosedSample]) -> str:
    """Return the samples of a closed group as a JSON list."""
    is_owned = any(sample.owner is not None for sample in samples)
    return _SAMPLES.dump_json(list(samples), exclude=None if is_owned else _OWNERS).decode()


def decode_samples(text: str) -> list[ClosedSample]:
    """Return the samples that `encode_samples` wrote."""
    return _SAMPLES.validate_json(text)


def owners_of(text: str) -> list[Owner]:
    """Return whose sessions the samples are parts of that `encode_samples` wrote."""
    return [sample.owner for sample in decode_samples(text) if sample.owner is not None]


def rollouts_of(text: str, user: str) -> set[str]:
    """Return the rollouts of the samples that are parts of a user's sessions."""
    samples = decode_samples(text)
    return {one.rollout_id for one in samples if one.owner is not None and one.owner.user == user}


def encode_summary(closure: GroupClosure) -> str:
    """Return the statistics of a closed group as JSON, and the weights of its rewards if there are any."""
    fields = ("reward_mean", "reward_std", "oldest_version", "newest_version")
    summary: dict[str, object] = {field: getattr(closure, field) for field in fields}
    if closure.reward_weights is not None:
        summary |= {
            "reward_weights": closure.reward_weights.model_dump(),
            "measured_on": closure.measured_on,
            "filtered_on": list(closure.filtered_on),
        }
    if closure.critical_steps is not None:
        summary["critical_steps"] = closure.critical_steps.model_dump()
    return json.dumps(summary)


def decode_weights(summary: str | None) -> RewardWeights | None:
    """Return the weights in what `encode_summary` wrote; None if there are none, or for a group that is open."""
    weights = json.loads(summary).get("reward_weights") if summary else None
    return None if weights is None else RewardWeights.model_validate(weights)


def decode_group(row: Row, rollouts: Mapping[str, Rollout], *, referred: Collection[str] = ()) -> Group:
    """Return a closed group from its row and its rollouts by id.

    `referred` are the ids of those whose sub-agents were left out.

    Raises:
        RecordLostError: A rollout of the group is missing.
    """
    closed = decode_samples(row["samples"])
    for gone in (sample.rollout_id for sample in closed if sample.rollout_id not in rollouts):
        raise RecordLostError(f"the rollout {gone} of a group is missing from the store", hint=codec.RESTORE)
    weights = decode_weights(row["summary"])
    summary = json.loads(row["summary"])
    summary.pop("reward_weights", None)
    samples = [
        GroupSample(
            sample=sample.sample,
            rollout=rollouts[sample.rollout_id],
            usable=sample.usable,
            masked_because=sample.masked_because,
            reward=sample.reward,
            reward_weights=weights if sample.usable else None,
            advantage=sample.advantage,
            nodes_by_reference=sample.rollout_id in referred,
        )
        for sample in closed
    ]
    return Group(
        group_id=str(GroupId(row["run_id"], row["number"])),
        number=row["number"],
        epoch=row["epoch"],
        task=samples[0].rollout.task,
        samples=samples,
        usable=sum(sample.usable for sample in samples),
        **summary,
    )


def decode_exported(row: Row, group: Group, members: Mapping[str, Row]) -> list[ExportedSample]:
    """Return the samples of a closed group from its row, joined with its batch's, and the rows of its rollouts."""
    in_batch = None if row["batch_number"] is None else str(BatchId(row["run_id"], row["batch_number"]))
    exported = []
    for sample in group.samples:
        member = members[sample.rollout.rollout_id]
        exported.append(
            ExportedSample(
                group_id=group.group_id,
                number=group.number,
                epoch=group.epoch,
                group_state=row["state"],
                dropped_because=row["reason"] if row["state"] == "dropped" else None,
                batch_id=in_batch,
                reward_mean=group.reward_mean,
                reward_std=group.reward_std,
                measured_on=group.measured_on,
                request=RolloutRequest.model_validate_json(member["request"]),
                sample=sample,
                oldest_version=member["oldest_version"],
                newest_version=member["newest_version"],
            )
        )
    return exported


def decode_batch(row: Row, run_id: str, groups: Sequence[int]) -> BatchLease:
    """Return a leased batch from its row and the numbers of its groups."""
    until: datetime = codec.when(row["lease_until"])
    return BatchLease(
        batch_id=str(BatchId(run_id, row["number"])),
        run_id=run_id,
        number=row["number"],
        groups=groups,
        delivery=row["deliveries"],
        lease_until=until,
        version=row["version"],
        dropped=json.loads(row["dropped"]),
    )
