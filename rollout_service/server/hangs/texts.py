"""The texts of a finding: its subject, its cause, and how a person can help."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import anyio
from pydantic import JsonValue

from api_schemas.rollouts.steps import StepKind
from api_schemas.views.hangs import HangVerdict, UsualTimes
from rollout_service.server.hangs.rules import OVERRUN_SECONDS, Signs
from rollout_service.server.hangs.signs.holders import Holder
from rollout_service.server.hangs.waits import StepWait

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
_GONE_SANDBOX = (
    "The rollout fails with a sandbox error once its call ends, or cancel it. Look for a killed process."
)


@dataclass(frozen=True, slots=True)
class Judged:
    """A wait that is remarkable, with all that is known about it."""

    wait: StepWait
    verdict: HangVerdict
    signs: Signs
    usual: UsualTimes | None = None
    holder: Holder | None = None
    note: str = ""
    """A further observation, as a clause."""

    @property
    def kind(self) -> StepKind:
        """The kind of the step."""
        return self.wait.step.kind

    @property
    def subject(self) -> str:
        """The thing that it waits for: a sandbox, an engine, a pool, a tool, or the store, for example."""
        if self.holder is not None:
            return self.holder.subject
        step, sandbox = self.wait.step, self.wait.sandbox
        if sandbox is not None and self.signs.responds is False:
            return sandbox.id
        if step.kind is StepKind.STORE:
            return "store"
        return step.name or str(step.detail.get("sandbox", "")) or self.wait.activity.environment

    def message(self, count: int) -> str:
        """Return a sentence that names the subject and the cause."""
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
        limit = self.wait.own_limit
        if limit is not None and self.wait.seconds > limit + OVERRUN_SECONDS:
            return f"it should have ended at its time limit of {limit:g} s"
        if self.verdict is HangVerdict.SLOW:
            return "it moves"
        still = self.signs.still_seconds
        if still is not None:
            return f"it has done nothing for {min(still, self.wait.quiet):.0f} s"
        return "no progress is seen" if self.wait.step.moved is None else self._since_progress()

    def _since_progress(self) -> str:
        return f"the last progress was {self.wait.quiet:.0f} s ago"

    def _usually(self) -> str:
        if self.usual is None:
            return ""
        return f"99 of 100 such steps take less than {self.usual.p99:.3g} s"

    def hint(self) -> str:
        """Return how it will end, and how a person can help."""
        if self.holder is not None:
            return self.holder.hint
        is_gone = self.wait.sandbox is not None and self.signs.responds is False
        hint = _GONE_SANDBOX if is_gone else _HINTS.get(self.kind, _HINT)
        if not is_gone and (limit := self.wait.own_limit) is not None:
            return f"Its time limit of {limit:g} s ends it. {hint}"
        left = seconds_left(self.wait)
        return hint if left is None else f"{hint} The limit of the stage ends it in {left:.0f} s."

    def detail(self) -> dict[str, JsonValue]:
        """Return further facts."""
        detail: dict[str, JsonValue] = dict(self.wait.step.detail)
        if self.holder is not None:
            detail |= self.holder.detail
        if self.wait.sandbox is not None:
            detail.setdefault("sandbox", self.wait.sandbox.id)
        return detail


def seconds_left(wait: StepWait) -> float | None:
    """Return the seconds until the limit of the stage; None if there is none."""
    scope = wait.activity.limit
    left = None if scope is None else scope.deadline - anyio.current_time()
    return left if left is not None and isfinite(left) else None
