"""An agent of smolagents, unchanged, runs its code in a sandbox of this service."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from smolagents import ActionStep, CodeAgent, Tool
from smolagents.models import ChatMessage, MessageRole, Model

from tests.support.e2b_service import e2b_service, point_programs_at

ROOT = Path(__file__).parents[3]
DEFINITION = ROOT / "sandboxes" / "definitions" / "base.def"
SETTINGS = """
images = ["code"]
templates = { code-interpreter-v1 = "code" }
"""

pytestmark = [
    pytest.mark.apptainer,
    pytest.mark.timeout(600),
    pytest.mark.slow(seconds=90),
    pytest.mark.extended("rollout_service/server/e2b", "sandboxes/definitions"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the image that docs/how-to/serve-e2b-programs.md tells to build, with the packages that are needed."""
    monkeypatch.setenv("ROLLOUT_IMAGES_DIR", str(tmp_path / "images"))
    command = [sys.executable, "-m", "rollout_service.cli", "image", "build", "code"]
    built = subprocess.run(
        [*command, "--definition", str(DEFINITION), "--arg", "PYTHON_PACKAGES=numpy pillow"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    with e2b_service(tmp_path, SETTINGS) as (_, found):
        yield found


class Scripted(Model):
    """A model that writes these pieces of code, one after the other."""

    def __init__(self, *codes: str) -> None:
        super().__init__()
        self._codes = iter(codes)
        self.told: list[Any] = []

    def generate(self, messages: list[Any], **_: Any) -> ChatMessage:
        self.told = messages
        return ChatMessage(role=MessageRole.ASSISTANT, content=f"Thought: go on\n<code>\n{next(self._codes)}\n</code>")


class Multiply(Tool):
    name = "multiply"
    description = "Multiplies two numbers."
    inputs = {
        "a": {"type": "integer", "description": "one"},
        "b": {"type": "integer", "description": "another"},
    }
    output_type = "integer"

    def forward(self, a: int, b: int) -> int:
        return a * b


def test_a_code_agent_works_to_its_final_answer(url, monkeypatch):
    point_programs_at(url, monkeypatch)
    picture = "from PIL import Image\nImage.new('RGB', (30, 20), 'red')"
    model = Scripted("x = 6\nprint('six:', x)", "y = multiply(a=x, b=7)\ny", "y / 0", picture, "final_answer(y)")
    sizes: list[object] = []

    def note_size(step: ActionStep, **_: Any) -> None:
        sizes.append(getattr(step.action_output, "size", None))

    with CodeAgent(tools=[Multiply()], model=model, executor_type="e2b", step_callbacks=[note_size]) as agent:
        assert agent.run("Multiply.") == 42
        told = str(model.told)
    assert sizes == [None, None, None, (30, 20), None]
    for part in ("six: 6", "42", "ZeroDivisionError"):
        assert part in told
