"""The client's models of environments and sandboxes match the JSON that the service writes."""

import json
import time
from dataclasses import asdict

import pytest

from api_schemas.environments import EnvironmentView
from api_schemas.nodes import SandboxView
from rollout_service.agents.harnesses.preset import HarnessSettings
from rollout_service.agents.parallel.settings import ParallelSettings
from rollout_service.agents.web.search import SearchSettings
from rollout_service.environments.builtin import calc
from rollout_service.environments.builtin.code import environment as code
from rollout_service.environments.builtin.math import environment as math
from rollout_service.environments.contract import EnvironmentSpec, EvaluateIn, SandboxSettings
from sandboxes import SandboxInfo

EVERYTHING = EnvironmentSpec(
    name="everything",
    description="All fields are set.",
    image="base",
    system="Be brief.",
    tools=["bash", "python"],
    sandbox=SandboxSettings(
        network=("example.org:443",), cpus=0.5, disk="1G", lifetime=60.0, env={"LANG": "C.UTF-8"}
    ),
    evaluate_in=EvaluateIn.FRESH,
    artifacts=["/workspace"],
    artifacts_size="1M",
    runs_submission=True,
    harness=HarnessSettings(name="codex", env={"SECRET": "nobody else's business"}),
    search=SearchSettings(url="https://search.example:8443/api?key=secret"),
    binds={"/inside": "/outside"},
    parallel=ParallelSettings(max_width=4, max_critical_steps=6),
)
KEEPING = EnvironmentSpec(name="keeping", image="base", evaluate_in=EvaluateIn.SAME, agent_processes="keep")
SPECS = [calc.SPEC, code.SPEC, math.SPEC, EVERYTHING, KEEPING]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_an_environment_is_shown_as_it_is_written(spec):
    written = json.loads(spec.model_dump_json())
    assert "binds" not in written, "paths of the host are nobody else's business"
    assert "SECRET" not in spec.model_dump_json().upper()
    assert json.loads(EnvironmentView.model_validate(written).model_dump_json()) == written


def test_the_view_of_an_environment_has_every_field_that_is_shown():
    hidden = {name for name, field in EnvironmentSpec.model_fields.items() if field.exclude}
    assert EnvironmentView.model_fields.keys() == EnvironmentSpec.model_fields.keys() - hidden


@pytest.mark.parametrize("pid", [None, 17])
def test_a_sandbox_is_shown_as_it_is(pid):
    info = SandboxInfo("a", "r-1/1", "base", "apptainer", time.time(), pid)
    assert SandboxView.model_validate(asdict(info)).model_dump() == asdict(info)
