"""Checks a harness: a real program in a real sandbox, a scripted model, and the gateway between them."""

from __future__ import annotations

import json
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from api_schemas.rollouts import Rollout, RolloutRequest
from api_schemas.tasks import Task
from api_schemas.trajectories import Trajectory
from rollout_service.agents.harnesses.preset import CheckTable
from rollout_service.agents.harnesses.registry import get_harness
from rollout_service.cli import common
from rollout_service.cli.common import CommandError
from rollout_service.cli.env.engines import ScriptedCall, ScriptedTurn, scripted_engine
from rollout_service.cli.server_child import running_server

STEPS = "steps.txt"
AGENT_SECONDS = 300.0
PROMPT = "Take the steps one after the other, then say that you have taken them."
GRADER = """\
import json, os, pathlib

steps = pathlib.Path("/workspace/{steps}")
taken = steps.read_text().split() if steps.exists() else []
reward = float(taken == [str(number) for number in range({turns})])
pathlib.Path(os.environ["ROLLOUT_RESULT"]).write_text(json.dumps({{"reward": reward}}))
"""


async def check_harness(name: str, turns: int, image: str | None) -> dict[str, Any]:
    """Run a harness for some steps; return the outcome, with `works`, and with `problem` if it does not."""
    preset = get_harness(name)
    if preset.check is None:
        raise CommandError(
            f"the harness {name!r} has no [check], so it cannot be checked",
            hint="Add one to its preset, or run a task with `rollout-service env run`.",
        )
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-harness-")))
        environment = write_environment(folder / "environment", name, turns, image)
        engine = await stack.enter_async_context(scripted_engine(script(preset.check, turns), preset.name))
        common.err().print(f"Starting a server and {preset.title}")
        flags = ["--environment", str(environment), "--backend", engine.url, "--sandbox", "apptainer"]
        client = await stack.enter_async_context(running_server(folder / "state", flags))
        rollout = await client.run(RolloutRequest(task=Task(environment=environment.name)))
    return judge(preset.name, preset.version, turns, rollout)


def script(check: CheckTable, turns: int) -> list[str]:
    commands = [f"echo {number} >> /workspace/{STEPS}" for number in range(turns)]
    steps = [_turn(check, command, f"Step {number}.") for number, command in enumerate(commands)]
    end = ScriptedTurn(content="All steps are taken.").text() if check.end is None else _turn(check, check.end, "")
    return [*steps, end]


def _turn(check: CheckTable, command: str, content: str) -> str:
    def filled(value: JsonValue) -> JsonValue:
        return value.replace("COMMAND", command) if isinstance(value, str) else value

    arguments = {name: filled(value) for name, value in check.arguments.items()}
    return ScriptedTurn(content=content, tool_calls=[ScriptedCall(name=check.tool, arguments=arguments)]).text()


def write_environment(folder: Path, harness: str, turns: int, image: str | None) -> Path:
    """Write an environment whose agent is the harness, and whose grader counts the steps."""
    folder.mkdir(parents=True)
    lines = [
        f"name = {json.dumps(folder.name)}",
        f"prompt = {json.dumps(PROMPT)}",
        f"harness = {json.dumps(harness)}",
        *([f"image = {json.dumps(image)}"] if image else []),
        "[limits]",
        f"max_turns = {turns + 8}",
        "max_tokens = 100000",
        f"agent_seconds = {AGENT_SECONDS}",
        "[evaluate]",
        'command = "python3 /environment/grade.py"',
    ]
    (folder / "environment.toml").write_text("\n".join(lines))
    (folder / "grade.py").write_text(GRADER.format(steps=STEPS, turns=turns))
    return folder


def judge(harness: str, version: str, turns: int, rollout: Rollout) -> dict[str, Any]:
    """Return the outcome of a rollout.

    `segments` are those that may be trained on: 1 if every turn extends the one before. `kept_share` is the share of
    turns after the first that continue their segment.
    """
    trajectory = rollout.trajectory or Trajectory(segments=[], messages=[], finish_reasons=[], fork_counts={})
    sampled = [len(set(segment.turn_ids) - {-1}) for segment in trajectory.segments]
    continued = sum(sampled) - len([count for count in sampled if count])
    problem = _problem(turns, rollout, len(sampled))
    return {
        "harness": harness,
        "version": version,
        "works": not problem,
        "state": rollout.state.value,
        "reward": rollout.reward,
        "stop_reason": rollout.stop_reason.value if rollout.stop_reason else None,
        "turns": rollout.usage.turns,
        "segments": len(sampled),
        "kept_share": continued / (sum(sampled) - 1) if sum(sampled) > 1 else 0.0,
        "side_segments": len(trajectory.untrained),
        "fork_counts": {reason.value: count for reason, count in trajectory.fork_counts.items()},
        "seconds": rollout.program.seconds if rollout.program else 0.0,
        "problem": problem,
    }


def _problem(turns: int, rollout: Rollout, segments: int) -> str:
    if rollout.error is not None:
        return f"{rollout.error.message} {rollout.error.hint or ''}".strip()
    said = f"; its output ends with: {rollout.program.output[-500:]}" if rollout.program else ""
    if rollout.reward != 1.0:
        return f"it did not take its {turns} steps in order{said}"
    if segments != 1:
        return f"its turns are in {segments} segments instead of one"
    return ""


def show_check(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if value != "" and name != "problem":
            common.print_line(f"{name:<14} {json.dumps(value) if isinstance(value, dict) else value}")
    if found["problem"]:
        common.err().print(found["problem"], soft_wrap=True)
