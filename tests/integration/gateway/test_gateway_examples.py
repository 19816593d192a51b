"""The example agents run as a user runs them, against a service and a scripted engine, and solve their task."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service.environments.builtin.calc import environment
from tests.support.adapters.service import engine, service

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "6 * 7"}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("gateway")
    answer = environment.dataset()[0]["answer"]
    with (
        engine(folder, CALL, rf"\boxed{{{answer}}}<|im_end|>") as engine_url,
        service(folder, "--backend", engine_url) as service_url,
    ):
        yield service_url


@pytest.mark.parametrize("example", ["openai_chat.py", "anthropic_messages.py"])
def test_an_example_solves_its_task(url, example):
    command = [sys.executable, str(EXAMPLES / example), "--url", url, "--rollouts", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("completed, reward 1.0, 2 turns")
