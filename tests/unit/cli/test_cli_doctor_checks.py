"""The checks of `doctor` judge the facts that they are given."""

import json
import resource
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from rollout_service.cli import app
from rollout_service.cli.doctor.checks import check_engine, check_mounts, check_open_files
from rollout_service.settings import Settings
from sandboxes import ApptainerConfig, LimitDefaults, LocalConfig
from sandboxes.host.facts import HostFacts, read_host_facts


@pytest.fixture
def facts() -> HostFacts:
    return read_host_facts({"PATH": ""})


def test_a_backend_of_an_unknown_kind_is_named_with_its_setting():
    backends = [{"url": "http://gpu-1:30000"}, {"url": "http://gpu-2:30000", "kind": "vlm"}]
    check = check_engine(Settings.model_validate({"backends": backends}))
    assert check.state == "missing"
    assert check.found == "backends.1.kind: there is no kind of engine 'vlm'; did you mean vllm?"
    assert check.fix.startswith("Known kinds: sglang, vllm.")


def test_root_without_the_capability_to_mount_is_warned(facts):
    (found,) = check_mounts(replace(facts, is_root=True, sys_admin=False))
    assert (found.state, found.name) == ("missing", "mounting images")
    assert "CAP_SYS_ADMIN" in found.found
    assert "--cap-add SYS_ADMIN" in found.fix
    (found,) = check_mounts(replace(facts, is_root=True, sys_admin=True, fuse=False))
    assert found.state == "ok"


def test_a_table_of_open_files_that_two_sandboxes_can_fill_is_named(facts, tmp_path):
    limits = LimitDefaults(max_processes=512)
    settings = Settings(sandbox=ApptainerConfig(limits=limits), state_dir=tmp_path)
    each = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    (found,) = check_open_files(replace(facts, max_open_files=2 * 512 * each), settings)
    assert found.state == "limited"
    assert f"fs.file-max is {2 * 512 * each}" in found.found
    enough = int(found.fix.rpartition("=")[2])
    assert enough > settings.sandbox_ceiling * 512 * each
    (found,) = check_open_files(replace(facts, max_open_files=enough), settings)
    assert (found.state, found.fix) == ("ok", "")


def test_open_files_are_judged_only_where_they_are_known_and_bounded(facts, tmp_path):
    apptainer = Settings(sandbox=ApptainerConfig(), state_dir=tmp_path)
    local = Settings(sandbox=LocalConfig(provider="local"), state_dir=tmp_path)
    assert list(check_open_files(replace(facts, max_open_files=None), apptainer)) == []
    assert list(check_open_files(replace(facts, max_open_files=1), local)) == []


@pytest.mark.parametrize(
    ("embedded", "fix"),
    [
        ({"model": "/nowhere"}, "rollout-service serve --model calc-tuned"),
        ({"pools": {"frozen-1": "/nowhere"}}, "rollout-service serve --pool-model frozen-1=calc-tuned"),
    ],
)
def test_a_model_of_an_embedded_engine_that_is_not_there_is_named(embedded, fix):
    check = check_engine(Settings.model_validate({"embedded": embedded}))
    assert (check.state, check.found, check.fix) == ("missing", "there is no policy /nowhere", fix)


def test_the_embedded_engines_are_fine_with_shipped_models():
    settings = Settings.model_validate({"embedded": {"pools": {"frozen-1": "calc-base"}}})
    assert check_engine(settings).state == "ok"


def test_the_checks_are_of_the_state_folder_that_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--json", "--state-dir", str(tmp_path / "state")])
    (found,) = [check for check in json.loads(result.stdout) if check["name"] == "state folder"]
    assert str(tmp_path) in found["found"]


def test_stacks_without_a_service_are_refused():
    result = CliRunner().invoke(app, ["doctor", "--stacks"])
    assert result.exit_code == 1
    assert "Add --live." in result.stderr
