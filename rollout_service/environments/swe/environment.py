"""`swe`: repair a repository; right when its hidden tests pass in a fresh sandbox.

Guarantees:
- The agent's sandbox has no test of the evaluation, no reference repair, and no history after the task's commit.
- Only a patch leaves it, without changes of tests and of the configuration of their runner.
- Before the first patch of a task is judged, its tests must run on the repository as it was. So a run without results
  is the patch's doing, and a task that cannot be judged fails.
- Tests that time out with a patch, and not without it in the same sandbox before, are the patch's doing too.
- A report that does not show the failure of the canary (see `scripts`) gives no reward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from api_schemas.base import Name
from api_schemas.rollouts import StopReason
from rollout_service.base.errors import EnvironmentFailedError, InvalidFieldError
from rollout_service.base.templates import PromptTemplate
from rollout_service.environments.agent_environment import AgentEnvironment
from rollout_service.environments.contract import (
    EnvironmentSettings,
    EnvironmentSpec,
    EvaluateIn,
    SandboxSettings,
)
from rollout_service.environments.dataset_files import ShippedTasks
from rollout_service.environments.declarative.declaration import (
    DatasetTable,
    dataset_files,
    load_table,
    spec_from,
)
from rollout_service.environments.swe.grading import Precheck, SweEvaluation, TestsTimedOutError
from rollout_service.environments.swe.repository import StartState, apply_patch, make_ready, read_changes
from rollout_service.environments.swe.tasks import SweFamily, SweTask, read_task
from rollout_service.episodes import Episode, EpisodeLimits, Score
from sandboxes.errors import ImagePathError, LimitExceededError, SandboxClosedError
from sandboxes.image_names import read_image_name

ANY_IMAGE = "an image that each task names"
PATCH = "swe.patch"
START = "swe.start"
SOLVED = "swe.solved"
PRINTED_CHARS = 2_000


class SweEnvironment(AgentEnvironment):
    """A set of tasks; `for_instance` returns the environment of one."""

    has_solution = True

    def __init__(self, declaration: SweDeclaration, shipped: ShippedTasks = ShippedTasks()) -> None:  # noqa: B008
        super().__init__(declaration.spec(ANY_IMAGE))
        self.spec = declaration.spec()
        self._declaration = declaration
        self.shipped = shipped
        self._image = (
            PromptTemplate(declaration.image, where=f"the image of {declaration.name!r}") if declaration.image else None
        )
        self._prechecks: dict[str, Precheck] = {}

    def check(self, instance: dict[str, JsonValue]) -> None:
        self._task_of(instance)
        super().check(instance)

    def for_instance(self, instance: dict[str, JsonValue]) -> SweTaskEnvironment:
        return SweTaskEnvironment(self._declaration, self._task_of(instance), self._prechecks)

    def _task_of(self, instance: dict[str, JsonValue]) -> SweTask:
        return read_task(instance, self._declaration.family, image=self._image_of(instance))

    def _image_of(self, instance: dict[str, JsonValue]) -> str:
        """Return "" if the settings leave it to the instance."""
        if self._image is None:
            return ""
        image, template = self._image.render(instance), self._declaration.image or ""
        prefix, brace, _ = template.partition("{")
        if not brace:
            return image  # nothing of it is the instance's
        try:
            return read_image_name(image, prefix=prefix)
        except ImagePathError as error:
            message = f"makes {template!r} of the settings an image that no instance may name: {error}"
            raise InvalidFieldError.at("instance", message, hint=error.hint) from None

    async def run(self, episode: Episode) -> StopReason:  # noqa: ARG002 - it always refuses
        raise EnvironmentFailedError(f"{self.spec.name!r} runs one task at a time; see `for_instance`")

    async def evaluate(self, episode: Episode) -> Score:  # noqa: ARG002 - it always refuses
        raise EnvironmentFailedError(f"{self.spec.name!r} scores one task at a time; see `for_instance`")


class SweTaskEnvironment(AgentEnvironment):
    has_solution = True
    shares_setup = True
    init_leaves_files = True

    def __init__(self, declaration: SweDeclaration, task: SweTask, prechecks: dict[str, Precheck]) -> None:
        """`prechecks` has those of tasks whose tests are known to run, or have timed out; it grows."""
        super().__init__(declaration.spec(task.image))
        self._task = task
        self._prechecks = prechecks

    async def prepare(self, episode: Episode) -> None:
        episode.state[START] = await make_ready(episode.require_sandbox(), self._task)

    async def run(self, episode: Episode) -> StopReason:
        reason = await super().run(episode)
        await self._collect(episode)
        return reason

    async def solve(self, episode: Episode) -> StopReason:
        if not self._task.gold:
            raise EnvironmentFailedError(f"the instance {self._task.instance_id} has no reference repair")
        sandbox, reverse = episode.require_sandbox(), self._task.reverse_gold
        if why := await apply_patch(sandbox, self._task, self._task.gold, reverse=reverse):
            raise EnvironmentFailedError(f"the reference repair of {self._task.instance_id} does not apply: {why}")
        await self._collect(episode)
        episode.state[SOLVED] = True  # the evaluation then checks the task too
        return StopReason.FINISHED

    async def _collect(self, episode: Episode) -> None:
        """Keep the changes as a patch; a sandbox that the agent ended leaves none."""
        start: StartState = episode.state[START]
        sandbox = episode.require_sandbox()
        try:
            await sandbox.end_processes()
            patch, note = await read_changes(sandbox, self._task, start)
        except (SandboxClosedError, LimitExceededError) as error:
            patch, note = b"", f"the agent's sandbox ended, and its changes with it: {error}"
        episode.state[PATCH] = patch
        if note:
            episode.notes.append(note)

    async def evaluate(self, episode: Episode) -> Score:
        # The tests may have to run twice, with the changes and without.
        evaluation = SweEvaluation(self._task, episode.require_sandbox(), episode.limits.evaluate_seconds / 2)
        key = f"{self.spec.image} {self._task.instance_id} {hash(self._task.script)}"
        precheck = self._prechecks.get(key, Precheck.CANARY)
        if episode.state.get(SOLVED):
            precheck = Precheck.TESTS
        try:
            outcome = await evaluation.run(episode.state.get(PATCH, b""), precheck)
        except TestsTimedOutError:
            self._prechecks[key] = Precheck.TESTS
            raise
        if outcome.is_proven:
            self._prechecks.setdefault(key, Precheck.NOTHING)
        episode.notes += outcome.notes
        episode.grader_output = outcome.log.strip()[-PRINTED_CHARS:]
        return outcome.score


def load_swe(folder: Path) -> SweEnvironment:
    declaration = load_table(SweDeclaration, folder)
    return SweEnvironment(declaration, ShippedTasks.read(dataset_files(declaration.dataset, folder)))


def environment() -> SweEnvironment:
    return SweEnvironment(SweDeclaration())


# An `environment.toml` with `kind = "swe"` has these keys.

KIND = "swe"

SYSTEM = "You repair software. Use your tools to look at the repository, change it, and try out what you changed."
PROMPT = """\
The repository in {{ instance.repo_folder | default("/testbed") }} has this problem:

{{ instance.problem_statement }}

Change the repository's source so that the problem is solved. Tests that you cannot see check your work; changes of
tests and of their configuration are not taken over. There is no network. Call finish when you are done.
"""


class SweDeclaration(EnvironmentSettings):
    kind: Literal["swe"] = "swe"
    name: Name = KIND
    description: str = "Software repairs in the form of SWE-bench, scored by hidden tests."
    family: SweFamily | None = None
    """The set that the instances are from; by default, it is recognized by the fields of each."""
    image: str | None = Field(None, min_length=1)
    """The image of a task, a template such as `swe-{{ instance.instance_id }}`; by default, the instance names it."""
    system: str | None = SYSTEM
    prompt: str = PROMPT
    tools: list[str] = ["bash", "python", "str_replace_editor", "finish"]
    limits: EpisodeLimits = EpisodeLimits(
        max_turns=100,
        max_tokens=131_072,
        init_seconds=600.0,
        agent_seconds=2_700.0,
        rollout_seconds=3_600.0,
        evaluate_seconds=3_600.0,
    )
    sandbox: SandboxSettings = SandboxSettings(memory="8G", disk="16G", max_processes=1_024)
    dataset: DatasetTable | None = None
    """Files with one instance per line. They are kept in memory: give large ones to a run as a file."""

    def spec(self, image: str | None = None) -> EnvironmentSpec:
        """Describe a task that has the image, or what all tasks share."""
        return spec_from(self, image=image, evaluate_in=EvaluateIn.FRESH)
