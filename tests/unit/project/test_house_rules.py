"""scripts/architecture passes on this checkout, and names each rule that a checkout breaks."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "architecture"


FOR_TYPES = "if TYPE_CHECKING:\n    from rollout_service.cli import x\n"


def architecture(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--root", root]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_checkout_breaks_no_rule() -> None:
    ran = architecture(ROOT)
    assert ran.returncode == 0, ran.stderr
    assert "rollout_service/inference/pool" in ran.stdout


@pytest.mark.parametrize(
    ("files", "broken"),
    [
        ({"sandboxes/a.py": "import rollout_service"}, "sandboxes/a.py imports rollout_service"),
        ({"api_schemas/a.py": "from sandboxes import b"}, "api_schemas/a.py imports sandboxes"),
        ({"sandboxes/a.py": FOR_TYPES}, "sandboxes/a.py imports rollout_service"),
        (
            {"rollout_service/errors.py": "def f():\n    from rollout_service.api import app"},
            "rollout_service/errors.py imports api, which is above it",
        ),
        ({"rollout_service/attic.py": ""}, "rollout_service/attic.py has no layer"),
        (
            {"rollout_service/cli/a.py": "from rollout_service.client import X"},
            "rollout_service/cli/a.py imports client, which is above it",
        ),
        (
            {"sandboxes/a.py": "from sandboxes.b import y", "sandboxes/b/c.py": "import sandboxes.a"},
            "sandboxes.a and sandboxes.b import each other",
        ),
        ({f"sandboxes/m{number}.py": "" for number in range(14)}, "sandboxes holds 14 modules, over 13"),
        (
            {"api_schemas/a.py": "class Twin: ...", "sandboxes/b.py": "\nclass _Twin: ..."},
            "rollout-service has 2 classes Twin: api_schemas/a.py:1, sandboxes/b.py:2",
        ),
    ],
)
def test_a_broken_rule_is_named(tmp_path: Path, files: dict[str, str], broken: str) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    ran = architecture(tmp_path)
    assert ran.returncode == 1
    assert broken in ran.stderr


def test_types_may_come_from_a_higher_layer(tmp_path: Path) -> None:
    (tmp_path / "rollout_service").mkdir()
    (tmp_path / "rollout_service" / "errors.py").write_text(FOR_TYPES)
    assert architecture(tmp_path).returncode == 0
