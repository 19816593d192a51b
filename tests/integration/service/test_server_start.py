"""A service that cannot start says why in a sentence, and what to do, without a traceback."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest


def serve(folder: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollout_service.cli", "serve", "--port", "0", "--sandbox", "local"]
    return subprocess.run(
        [*command, "--state-dir", str(folder), *flags],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | variables,
        check=False,
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "/nowhere"], "/nowhere/config.json"),
        (["--host", "0.0.0.0"], "no key is set"),
        (["--engine", "gpu"], "embedded"),
        (["--config", "/nowhere.toml"], "settings file /nowhere.toml does not exist"),
    ],
)
def test_it_says_why(tmp_path, flags, says):
    ended = serve(tmp_path, *flags)
    assert ended.returncode != 0
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("keys", ["abc", '[""]', "[", ""])
def test_a_key_that_protects_nothing_is_refused_in_one_line(tmp_path, keys):
    ended = serve(tmp_path, "--host", "0.0.0.0", "--engine", "none", ROLLOUT_KEYS=keys)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ROLLOUT_KEYS: keys")
    assert "Traceback" not in ended.stderr


def test_a_failure_to_make_the_state_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    ended = serve(tmp_path / "file" / "below", "--engine", "none")
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert "the state folder" in ended.stderr
    assert "--state-dir" in ended.stderr


def test_a_store_that_is_not_a_database_is_reported(tmp_path):
    (tmp_path / "rollouts.sqlite3").write_bytes(b"not a database, and long enough to be taken for none" * 100)
    ended = serve(tmp_path, "--engine", "none")
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    assert "rollouts.sqlite3" in ended.stderr or "store" in ended.stderr


def test_the_message_ends_before_the_hint_begins(tmp_path):
    address = tmp_path / "address"
    flags = ["--port", "0", "--sandbox", "local", "--engine", "none", "--state-dir", str(tmp_path)]
    command = [sys.executable, "-m", "rollout_service.cli", "serve", *flags, "--port-file", str(address)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as first:
        try:
            while not address.exists():
                assert first.poll() is None
                time.sleep(0.05)
            assert first.stderr is not None
            for line in first.stderr:
                if b"startup complete" in line:
                    break
            second = serve(tmp_path, "--engine", "none")
        finally:
            first.terminate()
            first.communicate(timeout=60)
    assert second.returncode != 0
    assert f"is in use by the process with pid {first.pid}. " in second.stderr
