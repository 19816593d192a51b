"""Judges waits by how long steps usually take. A wait that only stuck work holds back is stuck itself."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import anyio

from api_schemas.rollouts.stages import Stage
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangVerdict, UsualTimes
from rollout_service.activity import Activity, ActivityBoard, OpenStep, StepObserver
from rollout_service.engines.serving.policies import PolicyServing
from rollout_service.pipeline.context import AttemptContext
from rollout_service.server.hangs.findings import Judged
from rollout_service.server.hangs.holders import Holder, Holders
from rollout_service.server.hangs.probes import EngineProbes, SandboxProbes, StoreProbe
from rollout_service.server.hangs.rules import HELD_KINDS, UNSEEN, Signs, StepWait, judge

KEPT = 500
MAX_KEYS = 500
ENOUGH = 20
"""The least durations that make a history."""
NAMED = frozenset({StepKind.TOOL, StepKind.SANDBOX_START, StepKind.SESSION, StepKind.STORE, StepKind.ARTIFACTS})
"""Kinds whose name tells how long they take: an image does, the id of an engine does not."""


HeldBy = Callable[[StepKind, str], Holder]
"""Returns the holder of an intended wait of this kind and name."""


class StepClass(NamedTuple):
    """Steps that may be compared with each other."""

    environment: str
    stage: Stage | None
    kind: StepKind
    name: str


class StepDurations(StepObserver):
    def __init__(self) -> None:
        self._recent: OrderedDict[StepClass, deque[float]] = OrderedDict()

    def closed(self, activity: Activity, step: OpenStep) -> None:
        """Remember the duration; a failed or cancelled step says nothing about how long a good one takes."""
        if step.error is not None or step.ended is None:
            return
        key = class_of(activity, step)
        recent = self._recent.get(key)
        if recent is None:
            recent = self._recent[key] = deque(maxlen=KEPT)
            if len(self._recent) > MAX_KEYS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)
        recent.append(step.ended - step.started)

    def usual(self, key: StepClass) -> UsualTimes | None:
        """Return how long such steps take; None if fewer than `ENOUGH` have ended."""
        recent = self._recent.get(key)
        if recent is None or len(recent) < ENOUGH:
            return None
        ordered = sorted(recent)
        p50, p95, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.95, 0.99))
        return UsualTimes(count=len(ordered), p50=p50, p95=p95, p99=p99)


def class_of(activity: Activity, step: OpenStep) -> StepClass:
    name = step.name if step.kind in NAMED else ""
    return StepClass(activity.environment, step.stage, step.kind, name)


class Verdicts:
    def __init__(self, context: AttemptContext, serving: PolicyServing, durations: StepDurations) -> None:
        self._board: ActivityBoard = context.activities
        self._durations = durations
        self._engines = EngineProbes(serving.backend)
        self._sandboxes = SandboxProbes()
        self._store = StoreProbe(context.store)
        self._holders = Holders(context.stages, context.admission, context.subagent_slots, serving.pool)

    async def probe(self, suspects: list[StepWait], start_soon: Callable[..., object]) -> None:
        """Probe what these wait for. A question to the store may outlast the call, in a task of its own."""
        engines = {one.step.name for one in suspects if one.step.kind is StepKind.ENGINE}
        sandboxes = {one.sandbox.id: one.sandbox for one in suspects if one.sandbox is not None}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._engines.look, engines)
            tasks.start_soon(self._sandboxes.look, sandboxes)
        if any(one.step.kind is StepKind.STORE for one in suspects) and self._store.is_idle:
            start_soon(self._store.ask)

    def of(self, suspects: list[StepWait]) -> list[Judged]:
        # Many waits are of one class, and many have the same holder.
        usual, held_by = cache(self._durations.usual), cache(self._holders.of)
        found = (self._judge(wait, usual(class_of(wait.activity, wait.step)), held_by) for wait in suspects)
        judged = [one for one in found if one is not None]
        stuck = {one.wait.activity.rollout_id for one in judged if one.verdict is HangVerdict.STUCK}
        jammed = self._jammed_stages(stuck)
        return [
            replace(one, verdict=HangVerdict.STUCK, note="every one of them is stuck itself")
            if one.kind in (StepKind.PLACE, StepKind.WORKER) and one.wait.step.name in jammed
            else one
            for one in judged
        ]

    def _judge(self, wait: StepWait, usual: UsualTimes | None, held_by: HeldBy) -> Judged | None:
        signs = self._signs(wait)
        verdict = judge(
            wait.step.kind,
            seconds=wait.seconds,
            quiet=wait.quiet,
            usual=usual,
            limit=wait.activity.limit_seconds,
            own_limit=wait.step.limit,
            signs=signs,
        )
        if verdict is None:
            return None
        holder = self._holder(wait.step, verdict, held_by)
        if holder is not None:
            verdict = HangVerdict.STUCK if holder.is_gone else HangVerdict.HELD
            signs = Signs(responds=False) if holder.is_gone else UNSEEN
        return Judged(wait, verdict, signs, usual, holder, self._note(wait))

    def _signs(self, wait: StepWait) -> Signs:
        step = wait.step
        if step.kind is StepKind.ENGINE:
            signs = self._engines.signs(step.name)
            # A step that has streamed tokens is still if no more come, whatever else its engine does.
            return signs if step.moved is None else Signs(signs.responds, wait.quiet)
        if step.kind is StepKind.STORE:
            return self._store.signs()
        return UNSEEN if wait.sandbox is None else self._sandboxes.signs(wait.sandbox.id)

    def _holder(self, step: OpenStep, verdict: HangVerdict, held_by: HeldBy) -> Holder | None:
        if step.kind in HELD_KINDS:
            return held_by(step.kind, step.name)
        if step.kind is StepKind.ENGINE and verdict is HangVerdict.STUCK:
            return self._holders.pause_of(str(step.detail.get("pool", "")))
        return None

    def _note(self, wait: StepWait) -> str:
        step = wait.step
        if step.kind is StepKind.ENGINE:
            return self._engines.note(step.name)
        return self._store.error if step.kind is StepKind.STORE else ""

    def _jammed_stages(self, stuck: set[str]) -> set[str]:
        """Return the stages whose working rollouts are all stuck."""
        stuck_in, moving_in = set[str](), set[str]()
        for each in self._board.all():
            if each.stage is not None and each.working_since is not None:
                (stuck_in if each.rollout_id in stuck else moving_in).add(each.stage)
        return stuck_in - moving_in
