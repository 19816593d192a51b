"""The verdict on a log of tests: by the package swebench in a process of its own, or by the statuses that are expected.

Guarantee: a log is hostile text; reading it ends within `GRADING_SECONDS`, and no reading of it is a failure of the
service.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError, did_you_mean
from rollout_service.environments.libraries import Library
from rollout_service.environments.swe.tasks import SweTask

GRADING_SECONDS = 60.0
FOLDER = Path(__file__).parent
SWEBENCH = Library("swe", FOLDER / "requirements.lock")
PROGRAM = FOLDER / "swebench_program.py"

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_SUMMARY = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*)$", re.MULTILINE)
PASSING = frozenset({"PASSED", "XFAIL"})


@dataclass(frozen=True, slots=True)
class TestVerdict:
    """The verdict on one run of the tests."""

    __test__ = False  # pytest would take it for a class of tests

    resolved: bool
    ran: bool
    """Whether the log has the results of tests."""
    fail_to_pass: float
    """The share of the tests that should pass now and do; 1 if there are none."""
    pass_to_pass: float
    """The share of the tests that should still pass and do; 1 if there are none."""
    statuses: Mapping[str, str]
    """The status of each test, such as PASSED, by its id."""


async def judge_log(task: SweTask, log: str, canary: str = "") -> TestVerdict:
    """Return the verdict on the output of a task's evaluation.

    Args:
        task: the task.
        log: what the tests printed.
        canary: a part of the id of a test that the task does not know; "" if there is none.

    Raises:
        ConfigurationError: The package swebench is not installed, or has no such parser.
        EnvironmentFailedError: The log cannot be read.
    """
    if task.expected is not None:
        return _compare(task.expected, log, canary)
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
        done = await anyio.run_process(
            command, input=json.dumps(request).encode(), stderr=subprocess.PIPE, check=False
        )
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
    """Judge as R2E-Gym does: every test must have the status that is expected, and there must be no others."""
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
    """Return the tests of pytest's last summary, each with its status."""
    _, header, summary = _COLORS.sub("", log).rpartition("short test summary info")
    return [(found[2], found[1]) for found in _SUMMARY.finditer(summary)] if header else []


def test_name(node: str) -> str:
    """Return the name of a test as R2E-Gym writes it: pytest's id without the file, joined by dots."""
    name = node.split(" - ")[0]
    return ".".join(name.split("::")[1:]) or name


test_name.__test__ = False  # type: ignore[attr-defined]
