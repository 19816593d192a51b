"""Runs the instances of an environment with an idle agent and with its own solution, and measures them.

A run that fails is counted as failed, never as a reward of zero. Every run has new sandboxes, and the environment's
limits on its stages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
from pydantic import JsonValue

from api_schemas.rollouts import StopReason
from rollout_service.authoring.audit_report import AuditReport, InstanceAudit, TrialRecord
from rollout_service.base.errors import EnvironmentFailedError, describe, format_failure
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import Environment
from rollout_service.environments.wrapped import WrappedEnvironment
from rollout_service.episodes import Episode, Score
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.pipeline.trial import NO_MODELS, OtherModels, play
from rollout_service.testing.scripted_policy import ScriptedPolicy
from sandboxes import Sandbox
from sandboxes.host.processes import descendants_of
from sandboxes.task_groups import open_task_group

IDLE_TURNS = ["I do nothing."] * 1_000
"""One for each step that a task may have."""


async def audit_environment(
    environment: Environment,
    sandboxes: SandboxSource,
    instances: Sequence[tuple[int, dict[str, JsonValue]]],
    *,
    runs: int = 3,
    at_once: int = 1,
    models: OtherModels = NO_MODELS,
) -> AuditReport:
    """Audit instances, each with its index, `at_once` of them at a time.

    `runs` is how often each agent runs, to see whether its reward changes.

    Raises:
        EnvironmentFailedError: There is no instance.
    """
    if not instances:
        raise EnvironmentFailedError(
            "the environment has no instance to audit",
            hint="Pass one with --instance, or add a data set to the environment.",
        )
    before = await sandboxes.provider.egress_counts()
    audits = [InstanceAudit(index) for index, _ in instances]
    limiter = anyio.CapacityLimiter(at_once)

    async def audit_one(audit: InstanceAudit, data: dict[str, JsonValue]) -> None:
        async with limiter:
            await _audit_instance(environment, sandboxes, audit, data, runs, models)

    async with open_task_group() as tasks:
        for audit, (_, data) in zip(audits, instances, strict=True):
            tasks.start_soon(audit_one, audit, data, name=f"audit of instance {audit.index}")
    after = await sandboxes.provider.egress_counts()
    network = environment.spec.sandbox.network
    return AuditReport(
        environment=environment.spec.name,
        has_solution=environment.has_solution,
        network=network if isinstance(network, str) else ", ".join(network),
        connections=after.allowed - before.allowed,
        refused=sum(after.refused.values()) - sum(before.refused.values()),
        instances=tuple(audits),
    )


async def _audit_instance(
    environment: Environment,
    sandboxes: SandboxSource,
    audit: InstanceAudit,
    data: dict[str, JsonValue],
    runs: int,
    models: OtherModels,
) -> None:
    for run in range(runs):
        leaks = audit.leaks if run == 0 else None
        audit.idle.append(await _trial(_Probe(environment, solves=False, leaks=leaks), data, sandboxes, models))
        if environment.has_solution:
            audit.solved.append(await _trial(_Probe(environment, solves=True), data, sandboxes, models))


async def _trial(
    probe: _Probe, data: dict[str, JsonValue], sandboxes: SandboxSource, models: OtherModels
) -> TrialRecord:
    record = probe.record
    async with open_task_group() as tasks:
        tasks.start_soon(_sample_memory, probe)
        try:
            trial = await play(probe, dict(data), ScriptedPolicy(IDLE_TURNS), sandboxes, models)
            record.reward = trial.score.reward
        except Exception as error:  # noqa: BLE001 any error is a finding
            record.error = format_failure(describe(error))
        tasks.cancel_scope.cancel()
    return record


class _Probe(WrappedEnvironment):
    """Measures the stages of an environment whose agent does nothing, or applies the solution."""

    def __init__(self, environment: Environment, *, solves: bool, leaks: list[str] | None = None) -> None:
        """`leaks` gets the paths that the agent can read and should not; None looks for nothing."""
        super().__init__(environment)
        self._solves = solves
        self._leaks = leaks
        self.record = TrialRecord()
        self._episode: Episode | None = None

    @property
    def launcher(self) -> int | None:
        sandbox = self._episode.sandbox if self._episode is not None else None
        return sandbox.pid if sandbox is not None else None

    def for_instance(self, instance: dict[str, JsonValue]) -> Environment:
        self._environment = self._environment.for_instance(instance)
        self.spec, self.shares_setup = self._environment.spec, self._environment.shares_setup
        return self

    async def prepare(self, episode: Episode) -> None:
        await self._measured(self._environment.prepare, episode)

    async def init(self, episode: Episode) -> None:
        if self._environment.uses_gateway:
            raise EnvironmentFailedError(
                "the agent is a program of its own, which cannot be replaced by an audit",
                hint="Audit a copy of the environment without `harness`.",
            )
        await self._measured(self._environment.init, episode)

    async def _measured(self, do: Callable[[Episode], Awaitable[None]], episode: Episode) -> None:
        self._episode, begun = episode, time.perf_counter()
        await do(episode)
        self.record.init_seconds += time.perf_counter() - begun

    async def run(self, episode: Episode) -> StopReason:
        if self._leaks is not None:
            self._leaks += await self._find_leaks(episode)
        if not self._solves:
            return await self._environment.run(episode)
        begun = time.perf_counter()
        with anyio.fail_after(episode.limits.agent_seconds):
            reason = await self._environment.solve(episode)
        self.record.solve_seconds = time.perf_counter() - begun
        return reason

    async def _find_leaks(self, episode: Episode) -> list[str]:
        environment, prompt = self._environment, ""
        if isinstance(environment, AgentEnvironment):
            prompt = "\n".join(message.content for message in environment.messages(episode.instance))
        found = needles(episode.instance, environment.private_texts(), prompt)
        leaks = list(in_prompt(found, prompt))
        if episode.sandbox is not None and found:
            leaks += await in_sandbox(episode.sandbox, found)
        return leaks

    async def evaluate(self, episode: Episode) -> Score:
        begun = time.perf_counter()
        score = await self._environment.evaluate(episode)
        self.record.evaluate_seconds = time.perf_counter() - begun
        return score


# Looks in an agent's sandbox for what only the grader should know, the grader's files and the answers in the instance,
# as the agent could: with a program inside, as the agent's user, after `init`. Texts too short to tell are not searched
# for, and folders of the system's programs are left out.

SECRET_WORDS = ("answer", "solution", "expected", "test", "hidden", "gold", "reference", "target", "patch")
"""A field with one of these words in its name counts as the grader's."""
SHORTEST, LONGEST = 8, 400
SHORTEST_LINE = 24
"""Shorter lines of a grader's file occur by chance."""
LINES = 3
SEARCH_SECONDS = 60.0
LEFT_OUT = (
    *("proc", "sys", "dev", "usr", "bin", "sbin", "lib", "lib64", "boot"),
    *(".singularity.d", "site-packages"),
)
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Needle:
    what: str
    """Where the text comes from."""
    text: str


def needles(instance: Mapping[str, JsonValue], private: Mapping[str, str], prompt: str) -> list[Needle]:
    """Return the texts to search for, without those of the prompt itself."""
    found = list(_of_instance(dict(instance), "instance"))
    for path, text in private.items():
        lines = {line.strip() for line in text.splitlines()}
        longest = sorted((line for line in lines if SHORTEST_LINE <= len(line) <= LONGEST), key=len)[-LINES:]
        found += [Needle(f"the grader's file {path}", line) for line in longest]
    return [needle for needle in found if needle.what.startswith("instance") or needle.text not in prompt]


def in_prompt(found: list[Needle], prompt: str) -> Iterator[str]:
    for needle in found:
        if needle.text in prompt:
            yield f"the prompt holds {needle.what}"


async def in_sandbox(sandbox: Sandbox, found: list[Needle]) -> list[str]:
    probe = await sandbox.exec(["grep", "-IF", "-m1", "--exclude-dir=x", "-e", "x"], stdin=b"x", cwd="/")
    if probe.exit_code != 0:  # some have fewer options, and report an unknown one like a text that is nowhere
        return ["this image has no GNU grep, so its files were not searched"]
    leaks: list[str] = []
    options = [f"--exclude-dir={name}" for name in LEFT_OUT]
    whats = dict.fromkeys(needle.what for needle in found)
    isolated = sandbox.workdir == sandbox.spec.workdir
    root = "/" if isolated else sandbox.workdir  # without isolation, the rest is the host's
    for what in whats:
        patterns = "\n".join(needle.text for needle in found if needle.what == what)
        result = await sandbox.exec(
            ["grep", "-rlIF", "-m1", *options, "-f", "-", "--", root],
            stdin=patterns.encode(errors="replace"),
            cwd="/",
            timeout=SEARCH_SECONDS,
        )
        if result.timed_out:
            leaks.append(f"the files were searched for {what} for only {SEARCH_SECONDS:g} s")
        paths = result.stdout.decode(errors="replace").splitlines()
        leaks += [f"{path} holds {what}" for path in paths[:SHOWN]]
    return leaks


def _of_instance(value: JsonValue, path: str, *, secret: bool = False) -> Iterator[Needle]:
    """Yield the long enough texts below fields that count as the grader's."""
    if isinstance(value, dict):
        for name, item in value.items():
            is_secret = secret or any(word in name.lower() for word in SECRET_WORDS)
            yield from _of_instance(item, f"{path}.{name}", secret=is_secret)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            yield from _of_instance(item, f"{path}[{at}]", secret=secret)
    elif secret and isinstance(value, str):
        lines = [line.strip() for line in value.splitlines()]
        for line in sorted((line for line in lines if SHORTEST <= len(line) <= LONGEST), key=len)[-LINES:]:
            yield Needle(path, line)


# The memory of sandboxes is sampled from outside, which works with every provider.

SAMPLE_SECONDS = 0.25
MOST_PROCESSES = 4096  # of one sandbox, in a sample
LOOK_SECONDS = 0.02  # until there is a sandbox: some trials end before a second sample


async def _sample_memory(probe: _Probe) -> None:
    """Record the most resident memory of a trial's sandboxes, until cancelled."""
    record = probe.record
    while True:
        if (pid := probe.launcher) is None:
            await anyio.sleep(LOOK_SECONDS)
            continue
        record.memory_bytes = max(record.memory_bytes, await anyio.to_thread.run_sync(_resident, pid))
        await anyio.sleep(SAMPLE_SECONDS)


def _resident(pid: int) -> int:
    pages = 0
    for process in (pid, *descendants_of(pid, MOST_PROCESSES)):
        with suppress(OSError):
            pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
