"""`doctor --batch --model` finds logprobs that are not those of the weights, and says where."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from rollout_client.arrays import BatchArrays
from rollout_service.cli import app
from rollout_service.testing import Shape, write_random_checkpoint
from tests.support.adapters.trainer_batches import PROMPT, write_batch

pytestmark = pytest.mark.slow

SHAPE = Shape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=48, vocab=300, context=600)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model") / "base", SHAPE)


def doctor(*flags: str | Path):
    return CliRunner().invoke(app, ["doctor", *map(str, flags)])


def report(*flags: str | Path) -> dict:
    result = doctor(*flags, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def changed(batch: Path, name: str, change) -> None:
    """Change a column of a batch file in place."""
    encoded = BatchArrays.from_bytes(batch.read_bytes()).batch.model_dump_json()
    tensors = {each: column.copy() for each, column in load_file(batch).items()}
    change(tensors[name])
    save_file(tensors, batch, metadata={"batch": encoded})


def test_the_engines_own_weights_agree_on_every_token(model, tmp_path):
    batch, tokens = write_batch(tmp_path / "batch.safetensors", model, version=3), tmp_path / "tokens.jsonl"
    found = report("--batch", batch, "--model", model, "--output", tokens)
    assert found["all"]["max"] < 1e-4
    assert found["all"]["tokens"] == 8 * (12 - PROMPT)
    (version,) = found["versions"]
    assert (version["version"], version["tokens"], version["kept_kv"]) == (3, 64, False)
    assert [(each["from"], each["to"]) for each in found["positions"]] == [(0, 63)]
    lines = [json.loads(line) for line in tokens.read_text().splitlines()]
    assert len(lines) == 64
    assert {line["position"] for line in lines} == set(range(PROMPT, 12))
    assert all(abs(line["engine"] - line["recomputed"]) == line["difference"] for line in lines)


def test_a_wrong_token_and_a_wrong_version_are_named(model, tmp_path):
    batch = write_batch(tmp_path / "batch.safetensors", model)

    def other_version(column: np.ndarray) -> None:
        column.reshape(8, 12)[5, PROMPT:] = 1

    def wrong(column: np.ndarray) -> None:
        column.reshape(8, 12)[5, 9] += 0.5

    changed(batch, "versions", other_version)
    changed(batch, "logprobs", wrong)
    found = report("--batch", batch, "--model", model)
    worst = found["worst"][0]
    assert (worst["segment"], worst["position"], worst["version"]) == (5, 9, 1)
    assert worst["difference"] == pytest.approx(0.5, abs=1e-4)
    assert [each["max"] < 1e-4 for each in found["versions"]] == [True, False]
    assert "by version" in doctor("--batch", batch, "--model", model).stdout


def test_another_temperature_is_another_distribution(model, tmp_path):
    batch = write_batch(tmp_path / "batch.safetensors", model)
    assert report("--batch", batch, "--model", model, "--temperature", "0.5")["all"]["max"] > 0.01


def test_unreadable_input_is_reported(model, tmp_path):
    batch = write_batch(tmp_path / "batch.safetensors", model)
    nothing = tmp_path / "nothing"
    nothing.write_bytes(b"\x00" * 4)
    for flags, words in (
        (["--batch", nothing, "--model", model], "cannot be read as a batch"),
        (["--batch", batch, "--model", tmp_path / "none"], "cannot be loaded as a model"),
        (["--batch", batch], "must be given together"),
    ):
        result = doctor(*flags)
        assert result.exit_code == 1
        assert words in result.stderr.replace("\n", " ")
