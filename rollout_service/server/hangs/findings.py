"""The findings, from their beginning to their end.

Guarantees: waits for the same thing are one finding, whose id stays the same for as long as one of them lasts, and
which begins once and ends once.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from api_schemas.views.hangs import HangFinding, HangVerdict
from rollout_service.server.hangs.stacks import stack_of_task
from rollout_service.server.hangs.texts import Judged
from rollout_service.server.hangs.waits import at

MAX_ROLLOUTS = 20
_ORDER = list(HangVerdict)


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes since the previous look."""

    began: list[HangFinding] = field(default_factory=list)
    worsened: list[HangFinding] = field(default_factory=list)
    """Those that were slow or held back before, and are stuck now."""
    ended: list[HangFinding] = field(default_factory=list)


class FindingLog:
    """The findings of the latest look: the waits that are stuck, slow or held back."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], HangFinding] = {}

    def update(self, judged: Iterable[Judged], others: Iterable[HangFinding] = ()) -> Changes:
        """Replace the findings with those of a new look; `others` are made elsewhere, and get their ids here."""
        groups: dict[tuple[str, str], list[Judged]] = defaultdict(list)
        for one in judged:
            groups[one.kind, one.subject].append(one)
        before = self._open
        self._open = {}
        changes = Changes()
        for found in (*map(_finding, groups.values()), *others):
            key = (found.kind, found.subject)
            known = before.pop(key, None)
            finding_id = known.finding_id if known else new_finding_id()
            finding = self._open[key] = found.model_copy(update={"finding_id": finding_id})
            if known is None:
                changes.began.append(finding)
            elif finding.verdict is HangVerdict.STUCK and known.verdict is not HangVerdict.STUCK:
                changes.worsened.append(finding)
        changes.ended.extend(before.values())
        return changes

    def list(self) -> list[HangFinding]:
        """Return the findings, the worst first."""
        return worst_first(self._open.values())


def new_finding_id() -> str:
    """Return a new id."""
    return f"hang-{os.urandom(6).hex()}"


def worst_first(findings: Iterable[HangFinding]) -> list[HangFinding]:
    """Return findings in the order of the API."""
    return sorted(findings, key=lambda one: (_ORDER.index(one.verdict), -one.seconds))


def _finding(group: list[Judged]) -> HangFinding:
    """Return the finding of waits for the same thing, without an id."""
    verdict = min((one.verdict for one in group), key=_ORDER.index)
    members = sorted(
        (one for one in group if one.verdict is verdict), key=lambda one: one.wait.seconds, reverse=True
    )
    oldest = members[0]
    wait, task = oldest.wait, oldest.wait.step.task
    rollouts = list(dict.fromkeys(one.wait.activity.rollout_id for one in members))
    return HangFinding(
        finding_id="",
        verdict=verdict,
        kind=oldest.kind,
        subject=oldest.subject,
        stage=wait.step.stage,
        environment=wait.activity.environment,
        since=at(wait.step.started),
        seconds=wait.seconds,
        usual=oldest.usual,
        responds=oldest.signs.responds,
        rollouts=rollouts[:MAX_ROLLOUTS],
        count=len(rollouts),
        message=oldest.message(len(rollouts)),
        hint=oldest.hint(),
        detail=oldest.detail(),
        stack=[] if task is None else stack_of_task(task),
    )
