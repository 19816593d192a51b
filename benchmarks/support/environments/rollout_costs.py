"""The measurements of whole rollouts: until the agent's first command, and of evaluations beside their graders."""

from __future__ import annotations

import re
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio.to_thread
from common import HERE, Figures
from support.bare_sandbox import exec_argv
from support.environments.played_service import CLOCK, PlayedService, request, require_reward

from api_schemas.rollouts import Rollout, RolloutRequest, Span, Stage
from sandboxes.host.facts import find_apptainer
from sandboxes.images.store import ImageStore

ENVIRONMENTS = tuple(HERE / "environments" / f"timed-{name}" for name in ("same", "fresh", "harbor"))
COMMANDS = {"clock": [CLOCK]}
GRADER = "grader_ms"
"""The part of a reward that is the grader's time, by the clock that it read at its beginning and at its end."""
TIME = re.compile(r"^\d+[.,]\d{6}$", re.MULTILINE)

Costs = Mapping[str, Sequence[float]]
"""Milliseconds by kind of environment."""


def timed_requests() -> dict[str, RolloutRequest]:
    """Return a task of each kind whose grader is timed by its own clock."""
    return {
        "same": request("timed-same"),
        "fresh": request("timed-fresh"),
        "harbor_same": request("timed-harbor", task="same"),
        "harbor_fresh": request("timed-harbor", task="fresh"),
    }


async def play_each(service: PlayedService, count: int) -> tuple[dict[str, list[Rollout]], list[float]]:
    """Run rollouts of each kind by turns, one after the other, with bare starts in between; return those in ms too.

    The first of each is not counted, since it reads or unpacks an image.
    """
    played: dict[str, list[Rollout]] = {kind: [] for kind in timed_requests()}
    bare = []
    for number in range(count + 1):
        started = await anyio.to_thread.run_sync(bare_start_ms)
        for kind, task in timed_requests().items():
            [rollout] = await service.run(task)
            if number:
                played[kind].append(require_reward(rollout))
        if number:
            bare.append(started)
    return played, bare


def span_of(rollout: Rollout, stage: Stage) -> Span:
    """Return the span of a stage, which the rollout entered once."""
    [span] = [span for span in rollout.spans if span.stage is stage]
    return span


def start_ms(rollout: Rollout) -> float:
    """Return the time from the beginning of the init stage to the agent's first command, which prints the time."""
    return (_command_ran_at(rollout) - span_of(rollout, Stage.INIT).started_at.timestamp()) * 1e3


def submitted_ms(rollout: Rollout) -> float:
    """Return the time from the submission to the agent's first command."""
    return (_command_ran_at(rollout) - rollout.created_at.timestamp()) * 1e3


def _command_ran_at(rollout: Rollout) -> float:
    messages = rollout.trajectory.messages if rollout.trajectory else []
    printed = next((message.content for message in messages if message.role == "tool"), "")
    found = TIME.search(printed)
    if found is None:
        raise SystemExit(f"the agent's first command should have printed the time: {printed!r}")
    return float(found[0].replace(",", "."))


def overhead_ms(rollout: Rollout, grader_ms: float | None = None) -> float:
    """Return the time of an evaluation without its grader's, which the grader has measured unless it is given."""
    own = rollout.reward_parts[GRADER] if grader_ms is None else grader_ms
    return span_of(rollout, Stage.EVALUATE).seconds * 1e3 - own


def start_figures(played: Mapping[str, Sequence[Rollout]], bare: Sequence[float]) -> Figures:
    """Return the figures of starts; those without a kind are of the declarative environments."""
    declared = [*played["same"], *played["fresh"]]
    figures: Figures = {
        "start_ms_p50": statistics.median(map(start_ms, declared)),
        "start_ms_max": max(map(start_ms, declared)),
        "limit_start_ms": statistics.median(bare),
        "start_submitted_ms_p50": statistics.median(map(submitted_ms, declared)),
    }
    others = {kind: rollouts for kind, rollouts in played.items() if kind not in ("same", "fresh")}
    return figures | {
        f"start_ms_p50_{kind}": statistics.median(map(start_ms, rollouts)) for kind, rollouts in others.items()
    }


def overhead_figures(costs: Costs) -> Figures:
    """Return the overhead of evaluations by kind, and over as many of each."""
    least = min(map(len, costs.values()))
    figures: Figures = {f"evaluate_overhead_ms_p50_{kind}": statistics.median(values) for kind, values in costs.items()}
    same_share = [value for values in costs.values() for value in values[:least]]
    return figures | {"evaluate_overhead_ms_p50": statistics.median(same_share)}


def bare_start_ms() -> float:
    """Return the time from starting a bare `apptainer exec` to the first command in it; this blocks."""
    argv = [*exec_argv(find_apptainer(), ImageStore().resolve("base")), "bash", "-c", CLOCK]
    begun = time.time()
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    return (float(done.stdout.replace(",", ".")) - begun) * 1e3


def environments_with(*folders: Path) -> list[Path]:
    """Return the folders of the timed environments, and more."""
    return [*ENVIRONMENTS, *folders]
