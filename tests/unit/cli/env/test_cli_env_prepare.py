"""`env prepare` looks at each instance once, at each image once, and begins none that there is no room for."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from rollout_service.cli import app
from rollout_service.cli.env.prepare import Room
from rollout_service.settings import load_settings
from sandboxes.errors import ImageBuildError
from sandboxes.images.store import ImageStore

INSTANCE = {
    "problem_statement": "It is broken.",
    "FAIL_TO_PASS": ["test_it"],
    "log_parser": "parse_log_pytest",
    "eval_script": "true",
}


@pytest.fixture(autouse=True)
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    monkeypatch.setenv("ROLLOUT_IMAGES_DIR", str(folder))
    return folder


def prepare(*arguments: str | Path) -> tuple[int, dict]:
    done = CliRunner().invoke(app, ["env", "prepare", *map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def fail(*arguments: str | Path) -> Result:
    done = CliRunner().invoke(app, ["env", "prepare", *map(str, arguments)])
    assert done.exit_code == 1
    return done


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_each_image_is_looked_for_once(tmp_path, images):
    for name in ("even", "odd"):
        (images / f"{name}.sif").touch()
    names = ["odd" if number % 2 else "even" for number in range(100)]
    rows = [INSTANCE | {"instance_id": f"a-{one}", "image": name} for one, name in enumerate(names)]
    expected = {"instances": 100, "images": 2, "present": 2, "made": 0, "failures": []}
    assert prepare(write(tmp_path / "rows.jsonl", *rows), "--environment", "swe") == (0, expected)
    tasks = [{"task": {"environment": "swe", "instance": row}} for row in rows]
    assert prepare(write(tmp_path / "tasks.jsonl", *tasks)) == (0, expected)


def test_what_cannot_be_had_is_listed_with_its_instance_and_cause(tmp_path, images):
    (images / "there.sif").touch()
    rows = [
        {"environment": "swe", "instance": INSTANCE | {"instance_id": "a-1", "image": "there"}},
        {"environment": "swe", "instance": INSTANCE | {"instance_id": "a-2", "image": "nowhere"}},
        {"environment": "swe", "instance": INSTANCE | {"instance_id": "a-3", "image": "nowhere"}},
        {"environment": "swe", "instance": INSTANCE | {"instance_id": "a-4", "image": "/etc/passwd.sif"}},
        {"environment": "unknown", "instance": {}},
        {"problem_statement": "not a task"},
    ]
    code, said = prepare(write(tmp_path / "tasks.jsonl", *rows))
    assert (code, said["instances"], said["images"], said["present"], said["made"]) == (1, 6, 2, 1, 0)
    missing, path, unknown, row = said["failures"]
    assert (missing["instance"], missing["image"]) == ("a-2", "nowhere")
    assert "there is no image 'nowhere'" in missing["error"]
    assert "rollout-service image build nowhere" in missing["hint"]
    assert (path["instance"], path["image"]) == ("a-4", None)
    assert "neither the name of an image of this machine" in path["error"]
    assert "no environment 'unknown'" in unknown["error"]
    assert row["instance"] == "row 6"
    assert "--environment" in row["hint"]
    shown = fail(tmp_path / "tasks.jsonl").stderr
    assert "a-2: nowhere: there is no image" in shown
    assert shown.splitlines()[-1] == "2 images of 6 instances: 1 there already, 0 made, 4 failed"


def test_a_file_that_cannot_be_read_is_an_error(tmp_path):
    assert "No such file" in fail(tmp_path / "missing.jsonl").stderr
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\nnot JSON\n')
    assert "line 2" in fail(tmp_path / "bad.jsonl").stderr


def test_a_split_is_chosen_and_must_exist(tmp_path, images):
    (images / "base.sif").touch()
    folder = tmp_path / "mine"
    folder.mkdir()
    table = '[evaluate]\ncommand = "true"\n[dataset]\npath = "tasks.jsonl"\n'
    (folder / "environment.toml").write_text(f'name = "mine"\nimage = "base"\n{table}')
    write(folder / "tasks.jsonl", *({"question": "?", "split": one} for one in ("train", "train", "test")))
    assert prepare(folder)[1]["instances"] == 3
    said = prepare(folder, "--split", "train")[1]
    assert said == {"instances": 2, "images": 1, "present": 1, "made": 0, "failures": []}
    assert "no split 'dev'" in fail(folder, "--split", "dev").stderr


def test_no_image_is_begun_without_room(images, monkeypatch):
    store = ImageStore(images)
    Room(store, load_settings()).require()
    (images / "large.sif").write_bytes(b"x" * 1000)
    monkeypatch.setenv("ROLLOUT_IMAGES_BUDGET_BYTES", "1000")
    with pytest.raises(ImageBuildError, match="images_budget_bytes"):
        Room(store, load_settings()).require()
    monkeypatch.setenv("ROLLOUT_IMAGES_BUDGET_BYTES", "1001")
    Room(store, load_settings()).require()
    monkeypatch.setenv("ROLLOUT_SANDBOXES__PRESSURE__DISK_FREE_BYTES", str(10**18))
    with pytest.raises(ImageBuildError, match="GB left"):
        Room(store, load_settings()).require()
