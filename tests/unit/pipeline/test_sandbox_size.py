"""An environment or a downloaded task gets no larger sandbox than the operator allows."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout_service.base.errors import InvalidFieldError
from rollout_service.cli import app
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, SandboxSettings
from rollout_service.pipeline.sandbox_source import SandboxSource
from rollout_service.server.lifecycle import check_image
from rollout_service.settings import SandboxesSettings
from sandboxes import LocalConfig, make_provider
from sandboxes.errors import SandboxConfigError

TASKS = Path(__file__).parents[3] / "examples/harbor"
ALLOWED = SandboxesSettings(max_memory_bytes=1 << 30, max_disk_bytes=2 << 30, max_processes=100)
FITS = SandboxSettings(memory="1G", disk="2G", max_processes=100)


@pytest.fixture
def source(tmp_path):
    return SandboxSource(make_provider(LocalConfig(provider="local"), tmp_path), settings=ALLOWED)


@pytest.mark.parametrize(
    ("wanted", "key"),
    [
        ({"memory": "1025M"}, "max_memory_bytes"),
        ({"disk": "1T"}, "max_disk_bytes"),
        ({"max_processes": 101}, "max_processes"),
    ],
)
async def test_a_larger_sandbox_is_refused_with_the_setting(source, wanted, key):
    larger = FITS.model_copy(update=wanted)
    with pytest.raises(SandboxConfigError) as refused:
        await source.start(EnvironmentSpec(name="e", image="base", sandbox=larger), "e")
    assert key in refused.value.hint
    grading = EnvironmentSpec(name="e", sandbox=FITS, evaluate_in=EvaluateIn.FRESH, grader_sandbox=larger)
    with pytest.raises(InvalidFieldError, match="sandbox cannot be had here") as request:
        await check_image(source, grading)
    assert (request.value.fields[0].path, key in request.value.hint) == ("environment", True)
    await source.check(EnvironmentSpec(name="e", sandbox=FITS))


def test_a_downloaded_task_that_asks_for_the_host_is_found(tmp_path):
    folder = tmp_path / "tasks"
    shutil.copytree(TASKS, folder)
    toml = folder / "word-count/task.toml"
    toml.write_text(toml.read_text().replace("memory_mb = 512", "memory_mb = 1000000"))
    report = json.loads(CliRunner().invoke(app, ["env", "check", str(folder), "--json"]).stdout)
    found = [line for line in report["findings"] if "max_memory_bytes" in line]
    assert len(found) == 1
    assert "word-count" in found[0]
