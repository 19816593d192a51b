"""Tries solutions and an idle agent. A task is good only if its solution gets 1 and doing nothing gets less."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
from pydantic import JsonValue

from rollout_service.authoring.audit import IDLE_TURNS
from rollout_service.base.errors import describe, format_failure
from rollout_service.environments.contract import Environment
from rollout_service.environments.wrapped import Solving
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import NO_MODELS, OtherModels, play
from rollout_service.testing.scripted_policy import ScriptedPolicy

GRACE_SECONDS = 120.0
PRINTED_LINES = 20
"""About as many as a summary of tests has."""


@dataclass(frozen=True, slots=True)
class TriedTask:
    instance: dict[str, JsonValue]
    solved: float | None
    """None if there is no reward."""
    idle: float | None
    """The reward of an agent that does nothing; None if there is none."""
    problems: tuple[str, ...]
    """Why the task is not good; empty if it is."""
    seconds: float


async def try_tasks(
    environment: Environment,
    instances: Sequence[dict[str, JsonValue]],
    sandboxes: SandboxSource,
    *,
    at_once: int,
    models: OtherModels = NO_MODELS,
    done: Callable[[TriedTask], None] = lambda _tried: None,
) -> list[TriedTask]:
    """Try the tasks of these instances, a few at a time; `done` is called as each ends."""
    found: dict[int, TriedTask] = {}
    limiter = anyio.CapacityLimiter(at_once)

    async def one(number: int, instance: dict[str, JsonValue]) -> None:
        async with limiter:
            found[number] = await _try_task(environment, instance, sandboxes, models)
            done(found[number])

    async with anyio.create_task_group() as tasks:
        for number, instance in enumerate(instances):
            tasks.start_soon(one, number, instance)
    return [found[number] for number in range(len(instances))]


async def _try_task(
    environment: Environment, instance: dict[str, JsonValue], sandboxes: SandboxSource, models: OtherModels
) -> TriedTask:
    started = time.perf_counter()
    specific = environment.for_instance(instance)
    solved, why = await _reward(Solving(specific), instance, sandboxes, models)
    idle, why_idle = await _reward(specific, instance, sandboxes, models)
    problems = []
    if solved != 1.0:
        problems.append(f"its solution gets {'no reward' if solved is None else f'{solved:g}'}{why}")
    if idle is None or idle >= 1.0:
        same = idle is None and why_idle == why and bool(problems)
        shown = ", for the same reason" if same else why_idle
        problems.append(f"doing nothing gets {'no reward' if idle is None else f'{idle:g}'}{shown}")
    return TriedTask(instance, solved, idle, tuple(problems), time.perf_counter() - started)


async def _reward(
    environment: Environment, instance: dict[str, JsonValue], sandboxes: SandboxSource, models: OtherModels
) -> tuple[float | None, str]:
    """Return the reward, or None and the reason as the end of a sentence."""
    limits = environment.spec.limits
    seconds = limits.init_seconds + limits.rollout_seconds + limits.evaluate_seconds + GRACE_SECONDS
    try:
        with anyio.fail_after(seconds):
            trial = await play(environment, dict(instance), ScriptedPolicy(IDLE_TURNS), sandboxes, models)
    except TimeoutError:
        return None, f": it took longer than {seconds:g} s"
    except Exception as error:  # noqa: BLE001 any error is the finding
        return None, f": {format_failure(describe(error))}"
    printed = trial.episode.grader_output.splitlines()[-PRINTED_LINES:]
    output = "\n  ".join(["; the end of what its grader printed:", *printed]) if printed else ""
    return trial.score.reward, "".join(f" ({note})" for note in trial.episode.notes) + output
