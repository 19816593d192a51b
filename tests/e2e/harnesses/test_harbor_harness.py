"""Tasks in Harbor's format through Codex: its work counts, and no attack through it gets a reward."""

import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import httpx
import pytest
from pydantic import HttpUrl

from api_schemas.inference import BackendSpec
from api_schemas.rollouts import Rollout, RolloutRequest, RolloutState, StopReason
from api_schemas.tasks import Task
from rollout_client.client import RolloutClient
from rollout_service.environments.harbor.collection import load_harbor
from rollout_service.server.api.app import create_app
from rollout_service.settings import PipelineSettings, SandboxesSettings, Settings
from rollout_service.settings.pipeline import HarborSettings
from rollout_service.testing import ScriptedEngine
from rollout_service.tokens import ChatRenderer
from sandboxes import ApptainerConfig
from sandboxes.config import PressureConfig
from sandboxes.images.build import ApptainerBuilder
from sandboxes.images.dockerfiles import build_many, dockerfile_at
from sandboxes.images.store import ImageStore
from tests.support.gateway.jobs import CONTEXT, IMAGE, VOCABULARY, Job, JobsScript, write_model
from tests.support.harbor.attacks import ATTACKS

HARNESS = "codex"
EXAMPLES = Path(__file__).parents[3] / "examples" / "harbor"
TASKS = ("counter-service", "ledger", "word-count")
SOLVE, IDLE = "solves the task", "does nothing"
BEHAVIORS = (SOLVE, IDLE, *ATTACKS)
AT_ONCE = 4

pytestmark = [
    pytest.mark.apptainer,
    pytest.mark.harnesses,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("harnesses"),
]


@dataclass(frozen=True, slots=True)
class CommandJob(Job):
    """A job whose steps are these commands."""

    commands: tuple[str, ...] = ()

    def command(self, number: int) -> str:
        return f"bash -c {shlex.quote(self.commands[number])}"


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Rollout]]:
    """Let an agent of every behavior work on every task; return the rollouts by their ids."""
    place = tmp_path_factory.mktemp("harbor")
    try:
        yield anyio.run(run_all, place)
    finally:
        shutil.rmtree(place, ignore_errors=True)


async def run_all(place: Path) -> dict[str, Rollout]:
    images = await build_images(place)
    jobs = [job for task in TASKS for number in range(len(BEHAVIORS)) for job in add_task(place, task, number)]
    for task, image in images.items():
        for copy in (place / "tasks").glob(f"{task}-*"):
            use_image(copy, image)
    model = write_model(place / "model")
    script = JobsScript(ChatRenderer.load(model), jobs)
    app = create_app(settings(place))
    found: dict[str, Rollout] = {}
    async with (
        ScriptedEngine(script, model_path=model, vocab_size=VOCABULARY, context_length=CONTEXT) as engine,
        app.router.lifespan_context(app),
        RolloutClient("http://localhost", transport=httpx.ASGITransport(app), patience_seconds=0) as client,
    ):
        await client.add_backend(BackendSpec(url=HttpUrl(engine.url)))
        names = sorted(path.name for path in (place / "tasks").iterdir())
        for name in names:
            await client.submit(
                RolloutRequest(rollout_id=name, task=Task(environment="harbor", instance={"task": name}))
            )
        for name in names:
            found[name] = await client.wait(name)
    return found


async def build_images(place: Path) -> dict[str, str]:
    """Build the images of the examples on a base that has the program; return their names by task."""
    store = ImageStore(place / "images", ApptainerBuilder(place / "layers"))
    store.root.mkdir()
    (store.root / "base.sif").symlink_to(ImageStore().root / "base.sif")  # for the toolkit
    dockerfiles = load_harbor(EXAMPLES, HarborSettings()).dockerfiles()
    base = {"base": str(ImageStore().root / f"{IMAGE}.sif")}
    sources = {name: dockerfile_at(path) for name, path in dockerfiles.items()}
    for outcome in await build_many(store, sources, given=base):
        assert outcome.error is None, outcome.error
    return {path.parents[1].name: name for name, path in dockerfiles.items()}


def add_task(place: Path, task: str, number: int) -> list[CommandJob]:
    """Copy a task for an agent of one behavior, and return a job for each of its steps."""
    folder = place / "tasks" / f"{task}-{number}"
    shutil.copytree(EXAMPLES / task, folder)
    jobs = []
    for instruction in sorted(folder.rglob("instruction.md")):
        step = instruction.parent.name if "steps" in instruction.parts else ""
        scenario = f"{task.replace('-', '')}{chr(ord('a') + number)}{step}"
        commands = commands_of(BEHAVIORS[number], instruction.parent)
        job = CommandJob(HARNESS, scenario, len(commands), commands=commands)
        with instruction.open("a") as file:
            file.write(f"\nThis is the job {job.name}: take its steps.\n")
        jobs.append(job)
    return jobs


def commands_of(behavior: str, step: Path) -> tuple[str, ...]:
    if behavior == IDLE:
        return ()
    return ((step / "solution" / "solve.sh").read_text() if behavior == SOLVE else ATTACKS[behavior],)


def use_image(task: Path, image: str) -> None:
    """Let a task start from an image that is there."""
    (task / "environment" / "Dockerfile").unlink()
    toml = task / "task.toml"
    toml.write_text(toml.read_text().replace("[environment]\n", f'[environment]\ndocker_image = "{image}"\n'))


def settings(place: Path) -> Settings:
    return Settings(
        state_dir=place / "state",
        engine="none",
        images_dir=place / "images",
        sandbox=ApptainerConfig(unpacked_dir=place / "unpacked"),  # three times 2 GB, removed at the end
        environments=[place / "tasks"],
        harbor=HarborSettings(harness=HARNESS),
        sandboxes=SandboxesSettings(pressure=PressureConfig(enabled=False)),
        pipeline=PipelineSettings(
            init_workers=AT_ONCE, rollout_workers=AT_ONCE, evaluate_workers=AT_ONCE, max_attempts=1
        ),
    )


@pytest.mark.parametrize("behavior", BEHAVIORS)
@pytest.mark.parametrize("task", TASKS)
def test_only_work_is_rewarded(rollouts, task, behavior):
    rollout = rollouts[f"{task}-{BEHAVIORS.index(behavior)}"]
    assert rollout.state is RolloutState.COMPLETED, rollout.error
    assert rollout.reward == float(behavior == SOLVE), (rollout.reward_parts, rollout.program)
    if rollout.stop_reason is not StopReason.SANDBOX_ENDED:  # as when its memory is full of files
        assert rollout.program.harness == HARNESS
    assert rollout.usage.turns >= 1
