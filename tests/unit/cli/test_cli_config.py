"""The settings reference is accurate, and `config show` says where each value comes from."""

import inspect
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout_service.cli import app, serve
from rollout_service.cli.settings_reference import reference
from rollout_service.settings import Settings
from rollout_service.settings.keys import iter_tables, known_keys
from rollout_service.settings.sources import FLAGS

ROOT = Path(__file__).parents[3]
FILE = """port = 9

[pipeline]
init_workers = 3
rollout_workers = 4
[pools.judge]
max_in_flight = 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_is_what_is_generated():
    written = (ROOT / "docs" / "settings.md").read_text()
    assert written == reference(), "run `rollout-service config docs > docs/settings.md`"
    assert CliRunner().invoke(app, ["config", "docs"]).stdout == written


def test_every_setting_says_what_it_means():
    silent = [key.dotted for table in iter_tables(Settings) for key in table.keys if not key.about]
    assert silent == []


def test_every_flag_of_serve_is_a_setting_and_says_which():
    options = set(inspect.signature(serve.command).parameters) - {"config", "port_file", "own"}
    assert {flag.removeprefix("--").replace("-", "_") for flag in FLAGS.values()} == options
    assert set(FLAGS) <= known_keys(Settings)


def shown(*arguments: str) -> dict[str, tuple[object, str | None]]:
    result = CliRunner().invoke(app, ["config", "show", "--json", *arguments])
    assert result.exit_code == 0, result.stderr
    return {row["key"]: (row["value"], row["where"] or row["origin"]) for row in json.loads(result.stdout)}


def test_each_value_comes_with_its_origin(folder, monkeypatch):
    file = folder / "rollout.toml"
    file.write_text(FILE)
    monkeypatch.setenv("ROLLOUT_PIPELINE__ROLLOUT_WORKERS", "6")
    monkeypatch.setenv("ROLLOUT_SANDBOXES", '{"warm": {"size": 7}}')
    values = shown("--evaluate-workers", "8", "--sandbox", "local")
    assert values["port"] == (9, f"{file}:1")
    assert values["pipeline.init_workers"] == (3, f"{file}:4")
    assert values["pools.judge.max_in_flight"] == (5, f"{file}:7")
    assert values["pipeline.rollout_workers"] == (6, "ROLLOUT_PIPELINE__ROLLOUT_WORKERS")
    assert values["sandboxes.warm.size"] == (7, "ROLLOUT_SANDBOXES")
    assert values["sandboxes.warm.starts"] == (2, "default")
    assert values["pipeline.evaluate_workers"] == (8, "--evaluate-workers")
    assert values["sandbox.provider"] == ("local", "--sandbox")
    assert values["environments"] == ([], "default")


def test_secrets_are_not_shown(monkeypatch):
    monkeypatch.setenv("ROLLOUT_KEYS", '["a-long-enough-secret-key-0123456789"]')
    result = CliRunner().invoke(app, ["config", "show"])
    assert result.exit_code == 0
    assert "ROLLOUT_KEYS" in result.stdout
    assert "secret-key" not in result.stdout
    refused = CliRunner().invoke(app, ["config", "show", "--backend", "http://me:hunter2@gpu-1:30000"])
    assert refused.exit_code == 1
    assert refused.stderr.startswith("error: --backend: backends.0.url: ")
    assert "hunter2" not in refused.stderr


def test_a_wrong_flag_is_a_wrong_use():
    assert CliRunner().invoke(app, ["config", "show", "--prot", "1"]).exit_code == 2
