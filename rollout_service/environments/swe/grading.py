"""Scores a patch in a fresh sandbox, by the log of its tests: swebench judges it in its own process, or the expected
statuses do.

Guarantee: a log is hostile text; reading it ends within `GRADING_SECONDS`, and no reading of it is a failure of the
service.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError, did_you_mean
from rollout_service.environments.libraries import Library
from rollout_service.environments.swe.patches import separate_forbidden
from rollout_service.environments.swe.repository import (
    apply_patch,
    go_to_start,
    restore_snapshot,
    take_snapshot,
)
from rollout_service.environments.swe.scripts import PlantedScript, plant_canary
from rollout_service.environments.swe.tasks import SweTask, without_colors
from rollout_service.episodes import Score
from sandboxes import Sandbox

GRADING_SECONDS = 60.0
FOLDER = Path(__file__).parent
SWEBENCH = Library("swe", FOLDER / "requirements.lock")
PROGRAM = FOLDER / "swebench_program.py"

_SUMMARY = re.compile(r"^(PASSED|FAILED|ERROR) (\S.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TestVerdict:
    __test__ = False  # pytest would take it for a class of tests

    resolved: bool
    ran: bool
    """The log has results of tests."""
    fail_to_pass: float
    """The share of tests that should pass now and do; 1 if there are none."""
    pass_to_pass: float
    """The share of tests that should still pass and do; 1 if there are none."""
    statuses: Mapping[str, str]
    """Such as PASSED, by the test's id."""


async def judge_log(task: SweTask, log: str, canary: str = "") -> TestVerdict:
    """Judge a log; `canary` is a part of the id of a test that the task does not know.

    Raises:
        ConfigurationError: The package swebench is not installed, or has no such parser.
        EnvironmentFailedError: The log cannot be read.
    """
    if task.expected is not None:
        return await anyio.to_thread.run_sync(_compare, task.expected, log, canary)  # it may have a million lines
    request = {
        "instance_id": task.instance_id,
        "repo": task.repo,
        "version": task.version,
        "log_parser": task.log_parser,
        "eval_type": task.eval_type,
        "FAIL_TO_PASS": list(task.fail_to_pass),
        "PASS_TO_PASS": list(task.pass_to_pass),
        "log": log,
    }
    return _verdict(task, await _ask(request))


async def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    command = [str(SWEBENCH.python()), "-I", str(PROGRAM)]
    with anyio.move_on_after(GRADING_SECONDS) as scope:
        done = await anyio.run_process(command, input=json.dumps(request).encode(), stderr=subprocess.PIPE, check=False)
    if scope.cancelled_caught:
        raise EnvironmentFailedError(f"the log of the tests was not read within {GRADING_SECONDS:g} s")
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise EnvironmentFailedError(f"swebench could not read the log of the tests: {said}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _verdict(task: SweTask, answer: dict[str, Any]) -> TestVerdict:
    if known := answer.get("unknown_parser"):
        raise ConfigurationError(
            f"swebench has no log parser {task.log_parser!r}{did_you_mean(task.log_parser, known)}",
            hint="Correct the instance's `log_parser`.",
        )
    tests = answer["report"].get("tests_status", {})
    return TestVerdict(
        resolved=answer["report"]["resolved"],
        ran=answer["found"],
        fail_to_pass=_share(tests.get("FAIL_TO_PASS"), task.fail_to_pass),
        pass_to_pass=_share(tests.get("PASS_TO_PASS"), task.pass_to_pass),
        statuses=answer["statuses"],
    )


def _share(tests: dict[str, list[str]] | None, named: tuple[str, ...]) -> float:
    if not named:
        return 1.0
    return len(tests["success"]) / len(named) if tests else 0.0


def _compare(expected: Mapping[str, str], log: str, canary: str) -> TestVerdict:
    """Require, as R2E-Gym does, that every test has its expected status, and that no other passed or failed."""
    named = {test_name(name): status for name, status in _summary(log)}
    statuses = {name: status for name, status in named.items() if not canary or canary not in name}
    right = sum(statuses.get(name) == status for name, status in expected.items())
    return TestVerdict(
        resolved=bool(expected) and statuses == dict(expected),
        ran=bool(named),
        fail_to_pass=right / len(expected) if expected else 1.0,
        pass_to_pass=1.0,
        statuses=named,
    )


def _summary(log: str) -> list[tuple[str, str]]:
    _, header, summary = without_colors(log).rpartition("short test summary info")
    return [(found[2], found[1]) for found in _SUMMARY.finditer(summary)] if header else []


def test_name(node: str) -> str:
    """Name a test as R2E-Gym does: pytest's id without the file, joined by dots; "" for all files with errors."""
    return ".".join(node.split(" - ")[0].split("::")[1:])


test_name.__test__ = False  # type: ignore[attr-defined]


class TestsTimedOutError(EnvironmentFailedError):
    __test__ = False  # pytest collects classes by their names


LOG_BYTES = 16 * 1024 * 1024
SHOWN_CHARS = 1_500
SHOWN_PATHS = 5


class Precheck(StrEnum):
    """The tests that run without the patch first, in the same sandbox."""

    NOTHING = "nothing"
    """The task's tests are known to run."""
    CANARY = "canary"
    """The canary alone, which shows that tests run."""
    TESTS = "tests"
    """All tests too: they must not get the reward. If they end in time, and do not with the patch, its reward is 0."""


@dataclass(frozen=True, slots=True)
class SweOutcome:
    score: Score
    notes: list[str] = field(default_factory=list)
    is_proven: bool = False
    """The task's tests are known to run."""
    log: str = ""
    """Empty if the tests were not run."""
    verdict: TestVerdict | None = None


@dataclass(frozen=True, slots=True)
class SweEvaluation:
    """The sandbox is one that nothing of the agent has touched."""

    task: SweTask
    sandbox: Sandbox
    seconds: float
    """For one run of the tests."""

    async def run(self, patch: bytes, precheck: Precheck = Precheck.CANARY) -> SweOutcome:
        """Score a patch in git's format, the agent's changes; an empty one is not judged.

        Raises:
            TestsTimedOutError: The tests did not end in time, for the first time or without the patch.
            EnvironmentFailedError: The task cannot be judged; the base class.
        """
        kept, left_out = separate_forbidden(patch, self.task.tests, self.task.gold)
        notes = [_left_out(left_out)] if left_out else []
        if not kept.strip():
            return SweOutcome(Score(0.0, {"submitted": 0.0}), notes)
        return await self.judge(kept, precheck, notes)

    async def judge(self, patch: bytes, precheck: Precheck, notes: list[str] | None = None) -> SweOutcome:
        """Run the tests with a patch that has nothing forbidden, also an empty one."""
        notes = notes or []
        await go_to_start(self.sandbox, self.task)
        planted = plant_canary(self.task.script, self.task.tests, self.task.folder)
        if precheck is not Precheck.NOTHING:
            tree = await take_snapshot(self.sandbox, self.task)
            await self._prove(planted)
            # The tests' own files would be in the way of the same tests.
            await restore_snapshot(self.sandbox, self.task, tree)
            if precheck is Precheck.TESTS:
                await self._require_unsolved(planted)
                await restore_snapshot(self.sandbox, self.task, tree)
        if patch.strip() and (why := await apply_patch(self.sandbox, self.task, patch)):
            notes.append(f"the changes do not apply to the repository as it was: {why}")
            return SweOutcome(Score(0.0, {"submitted": 1.0, "applied": 0.0}), notes, is_proven=True)
        try:
            log = await self._run(planted.text)
        except TestsTimedOutError as error:
            if precheck is not Precheck.TESTS:
                error.retryable = True  # the next try finds out whose fault it is
                raise
            notes.append(f"the tests do not end within {self.seconds:g} s with the changes, and do without them")
            return SweOutcome(Score(0.0, {"submitted": 1.0, "applied": 1.0}), notes, is_proven=True)
        verdict = await judge_log(self.task, log, planted.canary)
        return self._outcome(verdict, planted, log, notes)

    async def _prove(self, planted: PlantedScript) -> None:
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
        verdict = await judge_log(self.task, await self._run(planted.text), planted.canary)
        if verdict.resolved:
            raise EnvironmentFailedError(
                f"all tests of {self.task.instance_id} pass without any change",
                hint="Leave the instance out: it rewards an agent that does nothing.",
            )

    async def _run(self, script: str) -> str:
        """Return both streams as one."""
        path = f"/tmp/.rollout-{secrets.token_hex(16)}"  # noqa: S108
        await self.sandbox.write_file(path, script.encode(errors="surrogateescape"))
        result = await self.sandbox.exec(
            ["bash", "-c", 'exec bash "$1" 2>&1', "bash", path],
            cwd=self.task.folder,
            timeout=self.seconds,
            output_limit=LOG_BYTES,
        )
        if result.timed_out:
            raise TestsTimedOutError(
                f"the tests of {self.task.instance_id} did not end within {self.seconds:g} s",
                hint="Raise `evaluate_seconds`, or leave the task out if its reference repair takes as long.",
            )
        await self.sandbox.end_processes()
        return result.stdout.decode(errors="replace")

    def _outcome(self, verdict: TestVerdict, planted: PlantedScript, log: str, notes: list[str]) -> SweOutcome:
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
    return f"changes of tests, or of what configures them, were left out: {', '.join(paths[:SHOWN_PATHS])}{more}"
