"""Scores a patch in a fresh sandbox: proves that the tests run, applies the patch, runs them, and judges the report."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from rollout_service.base.errors import EnvironmentFailedError
from rollout_service.environments.swe.grading import TestVerdict, judge_log
from rollout_service.environments.swe.patches import separate_forbidden
from rollout_service.environments.swe.repository import (
    apply_patch,
    go_to_start,
    restore_snapshot,
    take_snapshot,
)
from rollout_service.environments.swe.scripts import PlantedScript, plant_canary
from rollout_service.environments.swe.tasks import SweTask
from rollout_service.episodes import Score
from sandboxes import Sandbox

LOG_BYTES = 16 * 1024 * 1024
SHOWN_CHARS = 1_500
SHOWN_PATHS = 5


@dataclass(frozen=True, slots=True)
class SweOutcome:
    """A score, and what people should know of it."""

    score: Score
    notes: list[str] = field(default_factory=list)
    is_proven: bool = False
    """Whether the task's tests are known to run."""
    log: str = ""
    """The output of the tests; empty if they were not run."""
    verdict: TestVerdict | None = None


@dataclass(frozen=True, slots=True)
class SweEvaluation:
    """One evaluation of a task, in a sandbox that nothing of the agent has touched."""

    task: SweTask
    sandbox: Sandbox
    seconds: float
    """The limit for one run of the tests."""

    async def run(
        self, patch: bytes, *, is_proven: bool = False, run_empty: bool = False, checks_task: bool = False
    ) -> SweOutcome:
        """Score a patch.

        Args:
            patch: what the agent changed, in git's format.
            is_proven: whether the task's tests are known to run, which spares a run of the canary alone.
            run_empty: whether to run the tests for an empty patch too; its reward is 0 without.
            checks_task: whether to run the tests without the patch first, which must not get the reward.

        Raises:
            ConfigurationError: The package swebench is not installed, or does not have the log parser.
            EnvironmentFailedError: The task cannot be judged, or its tests did not end in time.
        """
        kept, left_out = separate_forbidden(patch, self.task.tests, self.task.gold)
        notes = [_left_out(left_out)] if left_out else []
        if not kept.strip() and not run_empty:
            return SweOutcome(Score(0.0, {"submitted": 0.0}), notes)
        await go_to_start(self.sandbox, self.task)
        planted = plant_canary(self.task.script, self.task.tests, self.task.folder)
        if checks_task or not is_proven:
            tree = await take_snapshot(self.sandbox, self.task)
            await self._prove(planted)
            # The tests' own files would be in the way of the same tests.
            await restore_snapshot(self.sandbox, self.task, tree)
            if checks_task:
                await self._require_unsolved(planted)
                await restore_snapshot(self.sandbox, self.task, tree)
        if kept.strip() and (why := await apply_patch(self.sandbox, self.task, kept)):
            notes.append(f"the changes do not apply to the repository as it was: {why}")
            return SweOutcome(Score(0.0, {"submitted": 1.0, "applied": 0.0}), notes, is_proven=True)
        log = await self._run(planted.text)
        verdict = await judge_log(self.task, log, planted.canary)
        return self._outcome(verdict, planted, log, notes)

    async def _prove(self, planted: PlantedScript) -> None:
        """Run the canary on the repository as it was.

        Raises:
            EnvironmentFailedError: Its failure is not reported, so no report of this task is to be trusted.
        """
        log = await self._run(planted.control)
        verdict = await judge_log(self.task, log, planted.canary)
        works = planted.status(verdict.statuses) == "FAILED" if planted.canary else verdict.ran
        if not works:
            raise EnvironmentFailedError(
                f"the tests of {self.task.instance_id} cannot be run, even without changes: "
                + log.strip()[-SHOWN_CHARS:],
                hint="Check the image, and the instance's `eval_script` or `test_cmd` and `log_parser`.",
            )

    async def _require_unsolved(self, planted: PlantedScript) -> None:
        """Run the tests on the repository as it was.

        Raises:
            EnvironmentFailedError: They pass, so every agent would get the reward.
        """
        verdict = await judge_log(self.task, await self._run(planted.text), planted.canary)
        if verdict.resolved:
            raise EnvironmentFailedError(
                f"all tests of {self.task.instance_id} pass without any change",
                hint="Leave the instance out: it rewards an agent that does nothing.",
            )

    async def _run(self, script: str) -> str:
        """Run a script and return what it printed, both streams as one.

        Raises:
            EnvironmentFailedError: It did not end in time.
        """
        path = f"/tmp/.rollout-{secrets.token_hex(16)}"  # noqa: S108
        await self.sandbox.write_file(path, script.encode(errors="surrogateescape"))
        result = await self.sandbox.exec(
            ["bash", "-c", 'exec bash "$1" 2>&1', "bash", path],
            cwd=self.task.folder,
            timeout=self.seconds,
            output_limit=LOG_BYTES,
        )
        if result.timed_out:
            raise EnvironmentFailedError(
                f"the tests of {self.task.instance_id} did not end within {self.seconds:g} s",
                hint="Raise `evaluate_seconds`, or leave the task out if its reference repair takes as long.",
            )
        await self.sandbox.end_processes()
        return result.stdout.decode(errors="replace")

    def _outcome(
        self, verdict: TestVerdict, planted: PlantedScript, log: str, notes: list[str]
    ) -> SweOutcome:
        seen = planted.status(verdict.statuses)
        parts = {
            "submitted": 1.0,
            "applied": 1.0,
            "fail_to_pass": verdict.fail_to_pass,
            "pass_to_pass": verdict.pass_to_pass,
        }
        reward = float(verdict.resolved)
        if planted.canary:
            parts["canary_failed"] = float(seen == "FAILED")
            if seen != "FAILED":
                reward = 0.0
                what = "is reported as " + seen if seen else "is missing in the report"
                notes.append(f"the report of the tests is no evidence: a test that must fail {what}")
        if not verdict.ran:
            notes.append("no test has a result, though they run on the repository as it was")
        return SweOutcome(Score(reward, parts), notes, True, log, verdict)


def _left_out(paths: list[str]) -> str:
    more = f" and {len(paths) - SHOWN_PATHS} more" if len(paths) > SHOWN_PATHS else ""
    return (
        f"changes of tests, or of what configures them, were left out: {', '.join(paths[:SHOWN_PATHS])}{more}"
    )
