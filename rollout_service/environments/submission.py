"""Runs of an agent's program, kept as data for the grader.

Guarantees:
- While the program runs, its sandbox holds nothing of the grader, the result or the instance but this run's input.
- Each run has a limit on time and output, and all runs together have one on time.
- No process survives into the next run.
- Damage that the program does to its sandbox fails that run, never the evaluation.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import anyio
from pydantic import JsonValue

from rollout_service.base.errors import InvalidFieldError
from rollout_service.environments.contract import parse_size
from rollout_service.environments.declarative.declaration import RunTable
from sandboxes import Sandbox
from sandboxes.errors import LimitExceededError, SandboxClosedError, SandboxStartError

MAX_RUNS = 1_000
MAX_OUTPUT_BYTES = 16 * 1024 * 1024
"""For all runs together."""


@dataclass(frozen=True, slots=True)
class SubmissionRun:
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    """None if it did not exit by itself or was never started."""
    timed_out: bool = False
    truncated: bool = False
    """The middle of the output is missing."""


def read_inputs(table: RunTable, instance: dict[str, JsonValue]) -> list[str]:
    """
    Raises:
        InvalidFieldError: The instance has no usable input.
    """
    if table.stdin is None:
        return [""]
    found = instance.get(table.stdin)
    texts = [found] if isinstance(found, str) else found
    if isinstance(texts, list) and len(texts) <= MAX_RUNS and texts:
        checked = [text for text in texts if isinstance(text, str)]
        if len(checked) == len(texts):
            return checked
    message = f"must be a string, or a list of 1 to {MAX_RUNS} strings: the input of each run"
    raise InvalidFieldError.at(f"instance.{table.stdin}", message)


async def run_submission(sandbox: Sandbox, table: RunTable, inputs: list[str], seconds: float) -> list[SubmissionRun]:
    """Run all inputs; a run that would start after `seconds` counts as timed out."""
    limit = max(1, min(parse_size(table.output_size), MAX_OUTPUT_BYTES // (2 * len(inputs))))
    deadline = anyio.current_time() + seconds
    runs = []
    for text in inputs:
        left = min(table.seconds, deadline - anyio.current_time())
        runs.append(
            await _run(sandbox, table.command, text, left, limit) if left > 0 else SubmissionRun(timed_out=True)
        )
    return runs


async def _run(sandbox: Sandbox, command: str, text: str, seconds: float, limit: int) -> SubmissionRun:
    try:
        done = await sandbox.exec(
            ["bash", "-c", command],
            stdin=text.encode(errors="replace"),
            env={"ROLLOUT_WORKDIR": sandbox.workdir},
            timeout=seconds,
            output_limit=limit,
        )
        await sandbox.end_processes()
    except (SandboxStartError, SandboxClosedError, LimitExceededError) as error:
        return SubmissionRun(stderr=str(error))
    return SubmissionRun(
        done.stdout.decode(errors="replace"),
        done.stderr.decode(errors="replace"),
        done.exit_code,
        done.timed_out,
        done.truncated,
    )


def encode_runs(runs: list[SubmissionRun]) -> bytes:
    return json.dumps([asdict(run) for run in runs]).encode()
