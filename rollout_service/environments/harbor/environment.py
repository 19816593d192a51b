"""One task in Harbor's format as an environment.

Guarantees:
- While the agent works, its sandbox holds neither the tests nor the solution.
- A step's outcome is graded after the agent has ended for good, from the artifacts at the end of the step.
- An agent that runs out of time is graded; a verifier that does is a failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import anyio.to_thread
from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from api_schemas.trajectories import Message
from rollout_service.agents.harnesses.agent import ProgramSilentError
from rollout_service.base.errors import ConfigurationError, EnvironmentFailedError
from rollout_service.environments.agent_environment import AgentEnvironment, check_artifact
from rollout_service.environments.contract import EvaluateIn
from rollout_service.environments.declarative.files import archive
from rollout_service.environments.harbor import compose
from rollout_service.environments.harbor.compose import MAIN, Compose, ComposeService
from rollout_service.environments.harbor.spec import spec_of
from rollout_service.environments.harbor.task_folder import SETUP, SOLUTION, HarborTask, TaskStep
from rollout_service.environments.harbor.task_toml import HealthcheckTable
from rollout_service.environments.harbor.verifier import (
    HealthcheckFailedError,
    Rewards,
    Verifier,
    combine,
    is_below,
)
from rollout_service.episodes import SANDBOX_ENDED_SCORE, Episode, Score
from rollout_service.settings.pipeline import HarborSettings
from sandboxes import ExecResult, Sandbox
from sandboxes.errors import LimitExceededError, SandboxClosedError, SandboxError

GRADED = "harbor_rewards"
OVER = frozenset({StopReason.SANDBOX_ENDED, StopReason.CONTEXT_FULL, StopReason.MAX_TOKENS})
"""Reasons for which an agent cannot go on with the next step."""
SETUP_SECONDS = 120.0


LOGS = "/logs/services"
COMPLETE_SECONDS = 600.0
"""For a service that others wait for until it has completed; the deadline of `init` is usually nearer."""
_RUN = f"""
log={LOGS}/$1; shift
"$@" >"$log" 2>&1 </dev/null
code=$?
echo $code >"$log.exit"
exit $code
"""
_FAILED = f"""
shopt -s nullglob
for file in {LOGS}/*.exit; do
    read -r code <"$file"
    if [ "$code" != 0 ]; then echo "${{file%.exit}}"; exit 1; fi
done
"""

Check = Callable[[Sandbox, HealthcheckTable], Awaitable[None]]


async def start_services(sandbox: Sandbox, compose: Compose, require_healthy: Check) -> None:
    """Start all services but the agent's own as processes of the sandbox, in the order of their dependencies. Then each
    is healthy if it has a check, has not failed, and is reached by its name.

    Raises:
        HealthcheckFailedError: One did not become healthy, or failed.
    """
    hosts = "".join(f"127.0.0.1 {name}\n" for name in {MAIN: None, **compose.services})
    prepare = f"mkdir -p {LOGS} && cat >>/etc/hosts"
    prepared = await sandbox.exec(["bash", "-c", prepare], cwd="/", stdin=hosts.encode())
    if prepared.exit_code != 0:
        raise HealthcheckFailedError(
            f"services cannot get names: {prepared.stderr.decode(errors='replace')}",
            hint='Use provider = "apptainer", which makes /etc/hosts writable.',
        )
    for name in compose.order():
        service = compose.services[name]
        if service.argv:
            await _start(sandbox, name, service, completes=compose.is_awaited(name))
        if check := service.health:
            try:
                await require_healthy(sandbox, check)
            except HealthcheckFailedError as error:
                said = await _last_output(sandbox, f"{LOGS}/{name}")
                raise HealthcheckFailedError(f"the service {name!r}: {error}{said}", hint=error.hint) from error
    await _require_none_failed(sandbox)


async def _start(sandbox: Sandbox, name: str, service: ComposeService, *, completes: bool) -> None:
    folder = service.working_dir or sandbox.workdir
    await sandbox.exec(["mkdir", "-p", "--", folder, *(one.split(":")[1] for one in service.volumes)], cwd="/")
    run = ["bash", "-c", _RUN, "service", name, *service.argv]
    if not completes:
        run = ["bash", "-c", '"$@" >/dev/null 2>&1 </dev/null &', "start", *run]
    done = await sandbox.exec(run, cwd=folder, env=service.environment, timeout=COMPLETE_SECONDS)
    if done.timed_out:
        raise HealthcheckFailedError(f"the service {name!r} did not complete within {COMPLETE_SECONDS:g} s")
    if completes:
        await _require_none_failed(sandbox)


async def _require_none_failed(sandbox: Sandbox) -> None:
    done = await sandbox.exec(["bash", "-c", _FAILED], cwd="/")
    if done.exit_code != 0:
        log = done.stdout.decode(errors="replace").strip()
        raise HealthcheckFailedError(
            f"the service {log.rpartition('/')[2]!r} failed{await _last_output(sandbox, log)}",
            hint="Run its command in a sandbox of the task's image: `rollout-service env shell`.",
        )


async def _last_output(sandbox: Sandbox, log: str) -> str:
    done = await sandbox.exec(["tail", "-c", str(PRINTED_CHARS), log], cwd="/")
    said = done.stdout.decode(errors="replace").strip()
    return f"; it printed: {said}" if said else "; it printed nothing"


PRINTED_CHARS = 2_000
PRINTED = "/logs/agent/oracle.txt"

Work = Callable[[Episode, TaskStep, list[Message]], Awaitable[StopReason]]


class HarborTaskEnvironment(AgentEnvironment):
    def __init__(self, task: HarborTask, name: str, settings: HarborSettings) -> None:
        super().__init__(spec_of(task, name, settings))
        self.task = task
        self.has_solution = task.has_solution
        # Later steps, and services, begin with what their own commands leave running.
        self.init_leaves_files = task.compose is None and len(task.steps) == 1 and not self.uses_gateway
        self._settings = settings

    def findings(self) -> list[str]:
        return [*self.task.empty_instructions(), *self.task.unusable_scripts()]

    def warnings(self) -> list[str]:
        return list(self.task.warnings)

    def dockerfiles(self) -> dict[str, Path]:
        return self.task.dockerfiles()

    def messages(self, instance: dict[str, JsonValue]) -> list[Message]:  # noqa: ARG002 - the task says all
        return [Message(role="user", content=self.task.steps[0].instruction)]

    async def init(self, episode: Episode) -> None:
        await super().init(episode)
        sandbox = episode.require_sandbox()
        self._require_usable(sandbox)
        await sandbox.exec(["mkdir", "-p", "/logs/agent", "/logs/verifier", "/logs/artifacts"], cwd="/")
        if self.task.compose is not None:
            await start_services(sandbox, self.task.compose, _require_healthy)
        await self._begin(sandbox, self.task.steps[0])
        if (check := self.task.toml.environment.healthcheck) is not None:
            await _require_healthy(sandbox, check)

    def _require_usable(self, sandbox: Sandbox) -> None:
        if sandbox.workdir != sandbox.spec.workdir:
            raise EnvironmentFailedError(
                "tasks in Harbor's format have fixed paths, and this provider does not isolate files",
                hint='Use provider = "apptainer".',
            )
        if self.spec.evaluate_in is EvaluateIn.FRESH and not self.task.toml.verifier.is_separate:
            try:
                check_artifact(self.task.name, sandbox.workdir)
            except ConfigurationError as error:
                raise EnvironmentFailedError(
                    f"the working folder {sandbox.workdir} cannot be graded in a fresh sandbox",
                    hint="Set `workdir` in [environment] of the task.",
                ) from error

    async def run(self, episode: Episode) -> StopReason:
        return await self._run_steps(episode, self._work)

    async def solve(self, episode: Episode) -> StopReason:
        return await self._run_steps(episode, self._solve)

    async def _run_steps(self, episode: Episode, work: Work) -> StopReason:
        """Make the outcome of each step but the last a checkpoint."""
        reason, steps = StopReason.FINISHED, self.task.steps
        for number, step in enumerate(steps):
            if reason not in OVER:
                new = self.messages({}) if number == 0 else [*_unanswered(episode), _prompt(step)]
                reason = await self._prepare_and_work(episode, number, step, work, new)
            if number < len(steps) - 1 and episode.checkpoint is not None:
                await episode.checkpoint()
        return reason

    async def _prepare_and_work(
        self, episode: Episode, number: int, step: TaskStep, work: Work, new: list[Message]
    ) -> StopReason:
        sandbox = episode.require_sandbox()
        try:
            if number > 0:
                await self._begin(sandbox, step)
            reason = await work(episode, step, new)
            await self._collect(sandbox)
        except (SandboxError, HealthcheckFailedError, ProgramSilentError) as error:
            if number == 0 and not isinstance(error, SandboxClosedError | LimitExceededError):
                raise  # before the agent, or while it worked in a sandbox that had been sound
            episode.notes.append(f"the agent's sandbox could not be used any more: {error}")
            return StopReason.SANDBOX_ENDED
        return reason

    async def _work(self, episode: Episode, step: TaskStep, new: list[Message]) -> StopReason:
        whole = episode.limits
        seconds = step.agent.timeout_sec or whole.agent_seconds
        episode.limits = whole.model_copy(update={"agent_seconds": min(seconds, whole.agent_seconds)})
        try:
            return await self._run_agent(episode, new)
        finally:
            episode.limits = whole

    async def _solve(
        self,
        episode: Episode,
        step: TaskStep,
        new: list[Message],  # noqa: ARG002 - a solution reads no prompt
    ) -> StopReason:
        sandbox = episode.require_sandbox()
        files = await anyio.to_thread.run_sync(step.solution)
        if not any(file.path == SOLUTION for file in files):
            raise EnvironmentFailedError(f"{step.folders[-1]} has no solution/{SOLUTION}")
        await sandbox.import_path("/solution", archive(files))
        env = compose.resolve(self.task.toml.solution.env, self._settings.variables)
        seconds = step.agent.timeout_sec or episode.limits.agent_seconds
        # Its output goes to a file, since a server that it leaves running must not write into a closed pipe.
        command = f"chmod +x /solution/{SOLUTION}; /solution/{SOLUTION} >{PRINTED} 2>&1"
        done = await sandbox.exec(["bash", "-c", command], cwd=sandbox.workdir, env=env, timeout=seconds)
        if done.exit_code != 0:
            said = _printed(await sandbox.exec(["tail", "-c", str(PRINTED_CHARS), PRINTED], cwd="/"))
            episode.notes.append(f"{SOLUTION} ended with exit code {done.exit_code}: {said}")
        await sandbox.exec(["rm", "-rf", "/solution"], cwd="/")
        return StopReason.AGENT_TIMEOUT if done.timed_out else StopReason.FINISHED

    async def _begin(self, sandbox: Sandbox, step: TaskStep) -> None:
        """Copy a step's files into the working folder, and wait until the sandbox is healthy."""
        if files := await anyio.to_thread.run_sync(step.workdir):
            await sandbox.import_path(sandbox.workdir, archive(files))
        if any(file.path == SETUP for file in files):
            setup = f"{sandbox.workdir}/{SETUP}"
            done = await sandbox.exec(["bash", setup], cwd=sandbox.workdir, timeout=SETUP_SECONDS)
            if done.exit_code != 0:
                raise HealthcheckFailedError(f"{SETUP} of the step {step.name!r} failed: {_printed(done)}")
        if step.healthcheck is not None:
            await _require_healthy(sandbox, step.healthcheck)

    async def _collect(self, sandbox: Sandbox) -> None:
        """Gather files for a separate verifier; the agent may break the commands."""
        for command in self.task.toml.verifier.collect:
            await sandbox.exec(["bash", "-c", command.command], cwd=sandbox.workdir, timeout=command.timeout_sec)

    async def evaluate_checkpoint(self, episode: Episode, number: int) -> bool:
        step = self.task.steps[number]
        graded = _graded(episode)
        if number == 0:
            graded.clear()
        rewards = graded[number] = await self._verify(episode, step)
        if not is_below(rewards, step.min_reward):
            return True
        episode.notes.append(f"the step {step.name!r} is below its min_reward: the steps after it do not count")
        return False

    async def evaluate(self, episode: Episode) -> Score:
        steps, graded = self.task.steps, _graded(episode)
        last = len(steps) - 1
        if last and not graded:
            raise EnvironmentFailedError(
                "a task of several steps was not done step by step", hint="Use the built-in agent for it."
            )
        ended = [number for number in graded if is_below(graded[number], steps[number].min_reward)]
        if not ended:
            try:
                graded[last] = await self._verify(episode, steps[last])
            except SandboxClosedError:
                if self.spec.evaluate_in is EvaluateIn.SAME:
                    return SANDBOX_ENDED_SCORE
                raise
        named = [(steps[number].name, graded[number]) for number in sorted(graded)]
        return combine(named, self.task.toml.multi_step_reward_strategy)

    async def _verify(self, episode: Episode, step: TaskStep) -> Rewards:
        sandbox = episode.require_sandbox()
        env = compose.resolve(step.verifier.env, self._settings.variables)
        places = [sandbox.workdir if path == "." else path for path in self.spec.artifacts]
        rewards, episode.grader_output = await Verifier(step, env, places).run(sandbox)
        return rewards


def _graded(episode: Episode) -> dict[int, Rewards]:
    graded: dict[int, Rewards] = episode.state.setdefault(GRADED, {})
    return graded


def _prompt(step: TaskStep) -> Message:
    return Message(role="user", content=step.instruction)


def _unanswered(episode: Episode) -> list[Message]:
    """Answer the calls with which the last step ended, since every call must have a result."""
    last = episode.policy.messages[-1] if episode.policy.messages else None
    if last is None or last.role != "assistant":
        return []
    return [
        Message(role="tool", content="This step has ended.", tool_call_id=call.id, name=call.name)
        for call in last.tool_calls
    ]


async def _require_healthy(sandbox: Sandbox, check: HealthcheckTable) -> None:
    """Repeat a health check until it succeeds; failures in the start period do not count."""
    starting_until = anyio.current_time() + check.start_period_sec
    failures = 0
    while True:
        done = await sandbox.exec(["bash", "-c", check.command], cwd=sandbox.workdir, timeout=check.timeout_sec)
        if done.exit_code == 0:
            return
        starting = anyio.current_time() < starting_until
        failures += not starting
        if failures >= check.retries:
            raise HealthcheckFailedError(
                f"the health check failed {failures} times: {check.command!r}: {_printed(done)}",
                hint="Run the command in a sandbox of the task's image to see why.",
            )
        await anyio.sleep(check.start_interval_sec if starting else check.interval_sec)


def _printed(done: ExecResult) -> str:
    text = (done.stderr + done.stdout).decode(errors="replace").strip()
    return text[-PRINTED_CHARS:] or "it printed nothing"
