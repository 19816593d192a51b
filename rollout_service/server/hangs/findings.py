"""The findings, with their stacks and texts.

Waits for the same thing are one finding, which keeps its id, begins once and ends once. A stack has no values of
variables, and only its innermost `MAX_FRAMES` frames.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
from pydantic import JsonValue

from api_schemas.events import EventKind
from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangFinding, HangVerdict, StackFrame, UsualTimes
from rollout_service.server.hangs.holders import Holder
from rollout_service.server.hangs.rules import OVERRUN_SECONDS, Signs, StepWait, at

MAX_FRAMES = 60
_ROOT = f"{Path(__file__).resolve().parents[3]}/"
_PACKAGES = ("rollout_service/", "sandboxes/", "rollout_client/", "api_schemas/")
_INSTALLED = "/site-packages/"
_STANDARD = sysconfig.get_path("stdlib")
_PREFIXES = ("cr", "gi", "ag")
_AWAITS = {"cr": "cr_await", "gi": "gi_yieldfrom", "ag": "ag_await"}


def stack_of_task(task: asyncio.Task[Any]) -> list[StackFrame]:
    """Return where a suspended task waits, outermost frame first; quick and harmless on its own event loop."""
    return _described(_await_chain(task.get_coro()))


def stack_of_thread(frame: FrameType | None) -> list[StackFrame]:
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _described(reversed(frames))


def culprit(frame: FrameType | None) -> StackFrame | None:
    """Return the innermost frame outside of Python's own library."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_STANDARD, "<frozen ")) or _INSTALLED in file:
            return _describe(frame)
        frame = frame.f_back
    return None


def _await_chain(awaited: Any) -> Iterable[FrameType]:
    """Yield the frames of a coroutine and of those that it awaits."""
    for _ in range(10 * MAX_FRAMES):
        prefix = _prefix(awaited)
        if prefix is None:
            # No attribute of an async generator's step or a wrapped coroutine names what it awaits.
            awaited = next((each for each in gc.get_referents(awaited) if _prefix(each)), None)
            if awaited is None:
                return
            continue
        frame = getattr(awaited, f"{prefix}_frame")
        if frame is not None:
            yield frame
        awaited = getattr(awaited, _AWAITS[prefix])
        if awaited is None or isinstance(awaited, asyncio.Future):
            return


def _prefix(awaited: Any) -> str | None:
    return next((one for one in _PREFIXES if hasattr(awaited, f"{one}_frame")), None)


def _described(frames: Iterable[FrameType]) -> list[StackFrame]:
    return [_describe(frame) for frame in list(frames)[-MAX_FRAMES:]]


def _describe(frame: FrameType) -> StackFrame:
    # By text, since a late event loop describes the whole stack at once; paths would take most of the time.
    name = frame.f_code.co_filename.removeprefix(_ROOT)
    ours = name.startswith(_PACKAGES)
    name = name if ours else frame.f_code.co_filename.rpartition(_INSTALLED)[2]
    return StackFrame(file=name, line=frame.f_lineno or 0, function=frame.f_code.co_qualname, ours=ours)


_DOING = {
    StepKind.SANDBOX_START: "a sandbox is being started from {name}",
    StepKind.SESSION: "a session is being opened ({name})",
    StepKind.SETUP: "the environment {name} sets up its task",
    StepKind.ENGINE: "the engine {name} has a request",
    StepKind.TOOL: "the tool {name} runs",
    StepKind.AGENT: "the program {name} works",
    StepKind.ARTIFACTS: "the agent's files are being moved ({name})",
    StepKind.GRADER: "the grader of {name} runs",
    StepKind.JUDGE: "the judge {name} is asked",
    StepKind.SANDBOX_END: "a sandbox is being ended",
    StepKind.STORE: "the store is asked to {name}",
}

_HINTS = {
    StepKind.ENGINE: "The pool repeats requests elsewhere once its probes fail or nothing moves for its "
    "stall_seconds. Look for the request in the engine's log, and restart the engine if it does not recover.",
    StepKind.STORE: "Rollouts go on once the store can be written. Look for a full or slow disk, for another program "
    "that holds the file locked, or at the Redis server.",
    StepKind.TOOL: "Look at the sandbox's processes, or cancel the rollout.",
    StepKind.GRADER: "The time limit of the stage ends it. The stack shows where the grader waits.",
    StepKind.SANDBOX_START: "Its time limit ends it. Look at the disk with the images, and at the host's load.",
}
_HINT = "The time limit of the stage ends it. The stack shows where it waits; the rollout can be cancelled."
_GONE_SANDBOX = "The rollout fails with a sandbox error once its call ends, or cancel it. Look for a killed process."


@dataclass(frozen=True, slots=True)
class Judged:
    wait: StepWait
    verdict: HangVerdict
    signs: Signs
    usual: UsualTimes | None = None
    holder: Holder | None = None
    note: str = ""

    @property
    def kind(self) -> StepKind:
        return self.wait.step.kind

    @property
    def subject(self) -> str:
        """The thing that it waits for, such as a sandbox, an engine, a pool, a tool, or the store."""
        if self.holder is not None:
            return self.holder.subject
        step, sandbox = self.wait.step, self.wait.sandbox
        if sandbox is not None and self.signs.responds is False:
            return sandbox.id
        if step.kind is StepKind.STORE:
            return "store"
        return step.name or str(step.detail.get("sandbox", "")) or self.wait.activity.environment

    def message(self, count: int) -> str:
        who = "1 rollout waits" if count == 1 else f"{count} rollouts wait"
        seconds = f"{self.wait.seconds:.0f} s"
        if self.holder is not None:
            text = f"{who}, the oldest for {seconds}: {self.holder.why}"
        else:
            doing = _DOING[self.kind].format(name=self.wait.step.name or "?")
            text = f"{who}: {doing}, the oldest for {seconds}"
        reasons = [reason for reason in (self._reason(), self._usually(), self.note) if reason]
        return "; ".join([text, *reasons])

    def _reason(self) -> str:
        if self.holder is not None:
            return ""
        if self.signs.responds is False:
            return "what it waits for no longer answers"
        limit = self.wait.step.limit
        if limit is not None and self.wait.seconds > limit + OVERRUN_SECONDS:
            return f"it should have ended at its time limit of {limit:g} s"
        if self.verdict is HangVerdict.SLOW:
            return "it moves"
        still = self.signs.still_seconds
        if still is not None:
            return f"it has done nothing for {min(still, self.wait.quiet):.0f} s"
        if self.wait.step.moved is None:
            return "no progress is seen"
        return f"the last progress was {self.wait.quiet:.0f} s ago"

    def _usually(self) -> str:
        if self.usual is None:
            return ""
        return f"99 of 100 such steps take less than {self.usual.p99:.3g} s"

    def hint(self) -> str:
        if self.holder is not None:
            return self.holder.hint
        is_gone = self.wait.sandbox is not None and self.signs.responds is False
        hint = _GONE_SANDBOX if is_gone else _HINTS.get(self.kind, _HINT)
        if not is_gone and (limit := self.wait.step.limit) is not None:
            return f"Its time limit of {limit:g} s ends it. {hint}"
        left = seconds_left(self.wait)
        return hint if left is None else f"{hint} The limit of the stage ends it in {left:.0f} s."

    def detail(self) -> dict[str, JsonValue]:
        detail: dict[str, JsonValue] = dict(self.wait.step.detail)
        if self.holder is not None:
            detail |= self.holder.detail
        if self.wait.sandbox is not None:
            detail.setdefault("sandbox", self.wait.sandbox.id)
        return detail


def seconds_left(wait: StepWait) -> float | None:
    scope = wait.activity.limit
    left = None if scope is None else scope.deadline - anyio.current_time()
    return left if left is not None and isfinite(left) else None


MAX_ROLLOUTS = 20
_ORDER = list(HangVerdict)


class FindingLog:
    def __init__(self) -> None:
        self._open: dict[tuple[str, str], HangFinding] = {}

    def update(
        self, judged: Iterable[Judged], problems: Iterable[HangFinding] = ()
    ) -> list[tuple[EventKind, HangFinding]]:
        """Replace the findings; return those that began, worsened or ended. No step waits for `problems`."""
        groups: dict[tuple[str, str], list[Judged]] = defaultdict(list)
        for one in judged:
            groups[one.kind, one.subject].append(one)
        before = self._open
        self._open = {}
        changes: list[tuple[EventKind, HangFinding]] = []
        for found in (*map(_finding, groups.values()), *(_lasting(one, before) for one in problems)):
            key = (found.kind, found.subject)
            known = before.pop(key, None)
            finding_id = known.finding_id if known else new_finding_id()
            finding = self._open[key] = found.model_copy(update={"finding_id": finding_id})
            if known is None:
                changes.append((EventKind.HANG_BEGAN, finding))
            elif finding.verdict is HangVerdict.STUCK and known.verdict is not HangVerdict.STUCK:
                changes.append((EventKind.HANG_WORSENED, finding))
        return [*changes, *((EventKind.HANG_ENDED, gone) for gone in before.values())]

    def list(self) -> list[HangFinding]:
        return worst_first(self._open.values())


def new_finding_id() -> str:
    return f"hang-{os.urandom(6).hex()}"


def worst_first(findings: Iterable[HangFinding]) -> list[HangFinding]:
    return sorted(findings, key=lambda one: (_ORDER.index(one.verdict), -one.seconds))


def _lasting(problem: HangFinding, before: Mapping[tuple[str, str], HangFinding]) -> HangFinding:
    """Count the time of a known problem from when it was first seen."""
    known = before.get((problem.kind, problem.subject))
    if known is None:
        return problem
    seconds = (problem.since - known.since).total_seconds()
    return problem.model_copy(update={"since": known.since, "seconds": seconds})


def _finding(group: list[Judged]) -> HangFinding:
    verdict = min((one.verdict for one in group), key=_ORDER.index)
    members = sorted((one for one in group if one.verdict is verdict), key=lambda one: one.wait.seconds, reverse=True)
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
