"""A real agent's program works in a live session with only a base URL and a key; its tokens are recorded exactly."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import pytest

from api_schemas.rollouts.sessions import TurnKind
from api_schemas.sessions import OpenedSession, SessionRequest
from rollout_service.tokens import ChatRenderer
from sandboxes.host.facts import find_apptainer
from tests.support.gateway.jobs import CONTEXT, IMAGE, VOCABULARY, Job, JobsScript, write_model
from tests.support.live.child_service import live_service
from tests.support.samples import sampled_by_turn

pytestmark = [pytest.mark.apptainer, pytest.mark.harnesses, pytest.mark.timeout(300)]

STEPS = 3
CONFIG = """
model = "policy"
model_provider = "live"
check_for_update_on_startup = false
web_search = "disabled"
[model_providers.live]
name = "live"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "LIVE_KEY"
[analytics]
enabled = false
"""


class LocalJob(Job):
    """A job whose steps are taken in the program's working directory."""

    def command(self, number: int) -> str:
        return f"echo {number} >> steps.txt"


def codex(folder: Path, variables: Mapping[str, str]) -> Sequence[str]:
    """Return the command that runs the program: on the host if it is installed, otherwise from the image."""
    if found := shutil.which("codex"):
        return [found]
    images = os.environ.get("ROLLOUT_IMAGES_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    image = Path(images or cache / "rollout-service" / "images") / f"{IMAGE}.sif"
    given = [f"--env={name}={value}" for name, value in variables.items()]
    privileges = ["--no-privs"] if os.geteuid() == 0 else []
    flags = [*privileges, "--containall", f"--bind={folder}", f"--pwd={folder}", *given]
    return [str(find_apptainer()), "exec", *flags, str(image), "codex"]


async def work(folder: Path, opened: OpenedSession, prompt: str) -> None:
    """Let the program work, with the session's address and key."""
    home, place = folder / "home", folder / "work"
    for each in (home, place):
        await anyio.Path(each).mkdir(parents=True)
    await anyio.Path(home / "config.toml").write_text(CONFIG.format(url=opened.url))
    variables = {"CODEX_HOME": str(home), "LIVE_KEY": opened.key or ""}
    flags = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-C", str(place)]
    command = [*codex(folder, variables), *flags, prompt]
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **variables}
    done = await anyio.run_process(command, env=environment, cwd=place, check=False, stdin=None)
    assert done.returncode == 0, done.stderr.decode()[-4_000:]


async def test_codex_works_in_a_session(tmp_path):
    model = await anyio.to_thread.run_sync(write_model, tmp_path / "model")
    job = LocalJob("codex", "short", STEPS)
    script = JobsScript(ChatRenderer.load(model), [job])
    options = {"model_path": model, "vocab_size": VOCABULARY, "context_length": CONTEXT}
    async with live_service(tmp_path / "state", script=script, **options) as service:
        run = await service.train()
        opened = await service.client.open_session(SessionRequest(train=True))
        probes = len(service.engine.sampled)
        await work(tmp_path / "agent", opened, f"Work on the job {job.name}.")
        sampled = service.engine.sampled[probes:]
        session = await service.client.session(opened.session.session_id)
        turns = [mark.turn for mark in session.turns if mark.kind is TurnKind.MAIN]
        for turn in turns:
            await service.client.feedback(session.session_id, 1.0, turn=turn)
        await service.client.end_session(session.session_id)
        batch = await run.lease(timeout_seconds=30)
    steps = await anyio.Path(tmp_path / "agent" / "work" / "steps.txt").read_text()
    assert steps.split() == [str(number) for number in range(STEPS)]
    rollouts = [sample.rollout for group in batch.groups for sample in group.samples]
    assert len(turns) == STEPS + 1
    trained = [ids for one in rollouts for ids in sampled_by_turn(one.trajectory).values()]
    assert trained == sampled
