"""Runs attacks against an environment, each in its own rollout, and compares the rewards with an idle agent's.

An attack counts as `held` only if its reward is no higher than an idle agent's; every attack gets a verdict. The
attacker has the agent's whole sandbox, whatever tools the agent has; a program that is the agent is not started.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import anyio
from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.authoring.attacks.scripts import CAUSES, PRELUDE, SCRIPTS, Attack
from rollout_service.base.errors import EnvironmentFailedError, describe, format_failure
from rollout_service.environments.contract import Environment, EnvironmentSpec, EvaluateIn
from rollout_service.environments.wrapped import WrappedEnvironment
from rollout_service.episodes import Episode, PolicyTurn
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import NO_MODELS, OtherModels, play
from rollout_service.testing.scripted_policy import ScriptedPolicy
from sandboxes import Sandbox
from sandboxes.errors import SandboxError

ATTACK_SECONDS = 60.0
"""The time limit of the attack's script; processes that it leaves behind keep running."""
GRACE_SECONDS = 120.0
"""Time added to the evaluation's own limit for the attack, the sandboxes' starts and the transfer of files."""
MAX_CONCURRENT = 4
IDLE_ANSWER = "done"
MAX_TURNS = 1_000
"""The most turns, such as one for each step of a task; the attack begins with the first."""


class AttackVerdict(StrEnum):
    HELD = "held"
    """The reward is at most that of an idle agent."""
    FORGED = "forged"
    NULLED = "nulled"
    """There is no reward: the rollout would be masked or rolled out again."""
    NOT_PROMISED = "not promised"
    """The attack succeeded, and the environment cannot prevent it: its grader runs in the agent's own sandbox."""


@dataclass(frozen=True, slots=True)
class AttackOutcome:
    attack: str
    does: str
    verdict: AttackVerdict
    reward: float | None
    detail: str
    """The reason if there is no reward."""
    seconds: float


@dataclass(frozen=True, slots=True)
class AttackReport:
    environment: str
    evaluate_in: EvaluateIn
    idle_reward: float
    outcomes: tuple[AttackOutcome, ...]

    @property
    def broken(self) -> int:
        """The number of attacks that succeeded and should not have."""
        return sum(outcome.verdict in (AttackVerdict.FORGED, AttackVerdict.NULLED) for outcome in self.outcomes)

    @property
    def causes(self) -> dict[str, list[str]]:
        """The attacks that succeeded and should not have, by the probable cause: one fix may hold them all."""
        found: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            if outcome.verdict is AttackVerdict.FORGED:
                cause = CAUSES.get(outcome.attack, "the grader believes the agent")
            elif outcome.verdict is AttackVerdict.NULLED:
                cause = f"there is no reward: {outcome.detail.partition(':')[0]}"
            else:
                continue
            found.setdefault(cause, []).append(outcome.attack)
        return found

    def as_dict(self) -> dict[str, JsonValue]:
        counts = Counter(outcome.verdict.value for outcome in self.outcomes)
        return {
            **asdict(self),
            "attacks": len(self.outcomes),
            "broken": self.broken,
            "causes": {cause: [*names] for cause, names in self.causes.items()},
            "counts": {verdict.value: counts[verdict.value] for verdict in AttackVerdict},
        }


async def attack_environment(
    environment: Environment,
    sandboxes: SandboxSource,
    *,
    instance: dict[str, JsonValue] | None = None,
    attacks: Sequence[Attack] = SCRIPTS,
    max_concurrent: int = MAX_CONCURRENT,
    models: OtherModels = NO_MODELS,
    on_outcome: Callable[[int], object] = lambda _: None,
) -> AttackReport:
    """Attack one instance: by default, the first of the data set.

    `models` are the models that the environment uses. `on_outcome` is called after each attack, with the number of
    those done.

    Raises:
        EnvironmentFailedError: There is no instance, or not even an idle agent gets a reward.
    """
    chosen = instance if instance is not None else next(iter(environment.dataset()), None)
    if chosen is None:
        raise EnvironmentFailedError(
            "the environment has no instance to attack",
            hint="Pass an instance with --instance, or add a data set to the environment.",
        )
    target = _AttackedInstance(environment.for_instance(chosen), chosen, sandboxes, models)
    idle, detail = await target.reward_of(None)
    if idle is None:
        raise EnvironmentFailedError(
            f"not even an idle agent gets a reward: {detail}",
            hint="Fix the grader first. It must give a reward to an agent that does nothing.",
        )
    outcomes: dict[str, AttackOutcome] = {}
    limiter = anyio.CapacityLimiter(max_concurrent)

    async def run(attack: Attack) -> None:
        async with limiter:
            outcomes[attack.name] = await target.outcome_of(attack, idle)
            on_outcome(len(outcomes))

    async with anyio.create_task_group() as tasks:
        for attack in sorted(attacks, key=lambda attack: not attack.waits):
            tasks.start_soon(run, attack)
    spec = target.environment.spec
    return AttackReport(spec.name, spec.evaluate_in, idle, tuple(outcomes[attack.name] for attack in attacks))


@dataclass(frozen=True, slots=True)
class _AttackedInstance:
    environment: Environment
    instance: dict[str, JsonValue]
    sandboxes: SandboxSource
    models: OtherModels

    async def outcome_of(self, attack: Attack, idle: float) -> AttackOutcome:
        started = time.perf_counter()
        reward, detail = await self.reward_of(attack)
        if reward is not None and reward <= idle:
            verdict = AttackVerdict.HELD
        elif self.environment.spec.evaluate_in is EvaluateIn.SAME and attack.changes_programs:
            verdict = AttackVerdict.NOT_PROMISED
        else:
            verdict = AttackVerdict.NULLED if reward is None else AttackVerdict.FORGED
        return AttackOutcome(attack.name, attack.does, verdict, reward, detail, time.perf_counter() - started)

    async def reward_of(self, attack: Attack | None) -> tuple[float | None, str]:
        """Return the reward, or None and the reason."""
        watched, environment = _AgentSandboxRecorder(self.sandboxes), self.environment
        attacked = _WithoutProgram(environment) if environment.uses_gateway else environment
        try:
            with anyio.fail_after(environment.spec.limits.evaluate_seconds + GRACE_SECONDS):
                trial = await play(attacked, dict(self.instance), _Attacker(watched, attack), watched, self.models)
        except TimeoutError:
            return None, "the evaluation timed out"
        except Exception as error:  # noqa: BLE001 any error is the finding
            return None, format_failure(describe(error))
        return trial.score.reward, ""


class _WithoutProgram(WrappedEnvironment):
    """Leaves out the environment's program, so that only the attacker acts in its sandbox."""

    async def run(self, episode: Episode) -> StopReason:
        turn = await episode.policy.respond([], max_tokens=episode.limits.max_turn_tokens)
        episode.answer = turn.message.content
        return StopReason.FINISHED


class _AgentSandboxRecorder(SandboxSource):
    def __init__(self, sandboxes: SandboxSource) -> None:
        self._sandboxes = sandboxes
        self.agent: Sandbox | None = None
        super().__init__(sandboxes.provider, sandboxes.artifacts_bytes, sandboxes.secrets)

    async def start(self, spec: EnvironmentSpec, label: str, *sessions: Any, **options: Any) -> Sandbox:
        sandbox = await self._sandboxes.start(spec, label, *sessions, **options)
        self.agent = self.agent or sandbox
        return sandbox


class _Attacker(ScriptedPolicy):
    def __init__(self, watched: _AgentSandboxRecorder, attack: Attack | None) -> None:
        answer = attack.answer if attack and attack.answer else IDLE_ANSWER
        super().__init__([answer] * MAX_TURNS)
        self._watched = watched
        self._attack = attack

    async def respond(self, new_messages: list[Message], *, max_tokens: int) -> PolicyTurn:
        attack, self._attack = self._attack, None
        if attack is not None and self._watched.agent is not None:
            bash = await self._watched.agent.bash()
            with suppress(SandboxError):  # an attack may end its shell or its whole sandbox on purpose
                await bash.run(PRELUDE + attack.script, timeout=ATTACK_SECONDS)
        return await super().respond(new_messages, max_tokens=max_tokens)
